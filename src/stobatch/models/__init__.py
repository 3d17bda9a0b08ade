"""Networks: the paper's three f(x) = g(a(x)), plain stacks of layers, and your own."""

from stobatch.dp.mixing import mixing_layers
from stobatch.models.affine import AffineEncoder, ConvEncoder, DenseEncoder, OperatorNorms
from stobatch.models.architectures import Architecture, build, build_encoder, initialise
from stobatch.models.classifier import Classifier, budget_mb, bytes_per_row, rows_by_trial, rows_in_memory
from stobatch.models.handed_over import HandedOver, hand_over
from stobatch.models.layered import Layered, Squash, build_layered
from stobatch.models.network import Head, Network, ReferenceNorm, from_layers
from stobatch.models.replacements import FrozenAffine, fix, replace_batch_norm
from stobatch.models.validators import require_per_example
