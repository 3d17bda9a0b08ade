"""The DP-SGD family whose guarantees are theorems."""
