"""Write codes as other tools do: words of 32 bits, by numpy's own packing of bits."""

import numpy as np
import torch


def packed_words(codes, bits, dim):
    """Unsigned codes, 2-D, as int32 words packed along ``dim``: the codes' bits one after the other, lowest first."""
    rows = codes.numpy().astype(np.uint8)
    rows = rows if dim == 1 else rows.T
    stream = np.unpackbits(rows[..., None], axis=-1, bitorder="little", count=bits).reshape(len(rows), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = np.packbits(stream, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words if dim == 1 else words.T.copy())


def whole_words(codes, bits, dim):
    """As `packed_words`, but no code runs across words: the highest bits stay empty."""
    each, rows = 32 // bits, (codes if dim == 1 else codes.t()).numpy().astype(np.uint32)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % each))).reshape(len(rows), -1, each)
    words = (rows << (bits * np.arange(each, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)
    return torch.from_numpy(words if dim == 1 else words.T.copy())


def minus_one(words, bits):
    """Zero points as GPTQ's version 1 stores them: one is subtracted from each field, with borrows within a word.

    Fields of 3 bits run across words; there each field is its own.
    """
    (one,) = packed_words(torch.ones(1, 32 // bits, dtype=torch.uint8), bits, 1)[0].tolist()
    return torch.from_numpy((words.numpy().view(np.uint32) - np.uint32(one & 0xFFFFFFFF)).view(np.int32))
