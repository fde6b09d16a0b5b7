"""The decoders that ``--decoder`` names."""

from seqpar.decoders.plain import PlainDecoder as plain
from seqpar.decoders.primus import PrimusDecoder as primus
from seqpar.decoders.unetr import UnetrDecoder as unetr
