"""Modules, optimisers and training loops: plain pytrees over tensors."""

from strata.arguments import public_names
from strata.nn import initial, optim
from strata.nn.attention import MultiheadAttention
from strata.nn.checkpoint import Checkpoint, latest, leaf_names, save_checkpoint
from strata.nn.conv import AvgPool2d, Conv1d, Conv2d, Conv3d, MaxPool2d
from strata.nn.initial import Keys, manual_seed
from strata.nn.layers import (
    GELU,
    BatchNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Dropout,
    Embedding,
    Flatten,
    Function,
    GroupNorm,
    LayerNorm,
    Linear,
    ReLU,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
    Tanh,
)
from strata.nn.module import Module, cast_floats, modules_of, trainable
from strata.nn.recurrent import GRU, LSTM
from strata.nn.train import LossScale, Trainer

for _scope in (globals(), vars(initial), vars(optim)):
    public_names(_scope, of_values=True)
