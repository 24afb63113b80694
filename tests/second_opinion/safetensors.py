"""Reads and writes safetensors files: 8 bytes of header length, a JSON header, the tensors' bytes."""

import json
import struct

import numpy

# A tensor is held as its bits: bf16 has no numpy dtype, and no bit may change on the way.
BITS = {
    "BF16": numpy.dtype("<u2"),
    "F16": numpy.dtype("<u2"),
    "F32": numpy.dtype("<u4"),
    "F8_E4M3": numpy.dtype("u1"),
    "U8": numpy.dtype("u1"),
}


def write(path, tensors):
    """Writes `tensors`, name -> (safetensors dtype, array of bits)."""
    header, offset = {}, 0
    for name, (dtype, bits) in tensors.items():
        assert bits.dtype == BITS[dtype], name
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, bits in tensors.values():
            file.write(numpy.ascontiguousarray(bits).tobytes())


def read(path):
    """Returns name -> (safetensors dtype, array of bits); the tensors' bytes must tile the file."""
    with open(path, "rb") as file:
        data = file.read()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    body = data[8 + header_bytes :]
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, next_end = entry["data_offsets"]
        if begin != end:
            raise ValueError(f"{path}: {name} begins at byte {begin}; wanted {end}")
        end = next_end
        bits = numpy.frombuffer(body[begin:end], BITS[entry["dtype"]])
        tensors[name] = (entry["dtype"], bits.reshape(entry["shape"]))
    if end != len(body):
        raise ValueError(f"{path}: {len(body)} bytes of tensors; wanted {end}")
    return tensors
