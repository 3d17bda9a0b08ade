"""`serve`: certified predictions over HTTP, by the Open Inference Protocol, and a page that shows what they mean.

**Guarantee.** An answer is the one that `predict` gives: pictures of several clients pass together only where nothing
is drawn, and votes draw fresh secret noise for every request. Whatever a deadline cuts short is proved all the same.
"""

from typing import TYPE_CHECKING

from stobatch.lazy import lazy_names

if TYPE_CHECKING:
    from stobatch.serving.application import Limits
    from stobatch.serving.server import Server, serve

__all__ = ["Limits", "Server", "serve"]

__getattr__, __dir__ = lazy_names(__name__, {"application": ("Limits",), "server": ("Server", "serve")})
