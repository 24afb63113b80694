"""A source rank of a plan by Refit's C library (librefit.so, executor/include/refit/refit.h): numpy arrays, no torch, no refit package."""
import ctypes
import os

import numpy as np

BYTES = 128  # of a unique id
DTYPES = {1: np.uint16, 2: np.float16, 3: np.float32}  # bf16 (as bits), fp16, fp32


class Tensor(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size_bytes", ctypes.c_uint64),
                ("shape", ctypes.POINTER(ctypes.c_uint64)), ("dimensions", ctypes.c_size_t), ("dtype", ctypes.c_int32),
                ("reserved", ctypes.c_int32)]


class ExecutorOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), *[(name, ctypes.c_void_p) for name in ("plan", "device", "rendezvous", "fabric")],
                *[(name, ctypes.c_int32) for name in ("rank", "reserved", "without_graph", "reserved2", "without_memory_watch",
                                                      "transport")]]


class RunOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("timeout_ms", ctypes.c_int64), ("addresses", ctypes.c_void_p),
                ("address_count", ctypes.c_size_t), ("check", ctypes.c_int32), ("dense", ctypes.c_int32),
                ("direct_multiprocessors", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


VISITOR = ctypes.CFUNCTYPE(None, ctypes.POINTER(Tensor), ctypes.c_void_p)


class Source:
    """One rank of the plan's source on the CPU. `buffers` has an array for each of its tensors, by the plan's names: fill them, then `run`."""

    def __init__(self, library, plan, unique_id, rank=0, timeout=600):
        self._library, self._timeout_ms = ctypes.CDLL(os.fspath(library)), int(1000 * timeout)
        self._library.refit_status_message.restype = ctypes.c_char_p
        self._plan, device, rendezvous, self._executor = (ctypes.c_void_p() for _ in range(4))
        self._call("refit_plan_open", os.fsencode(plan), ctypes.byref(self._plan))
        self.buffers, self._tensors = {}, []
        add = VISITOR(self._add)
        self._call("refit_plan_visit_tensors", self._plan, rank, add, None)
        self._call("refit_device_create_host", ctypes.byref(device))
        world = self._library.refit_plan_world_size(self._plan)
        self._call("refit_rendezvous_create_unique_id", bytes(unique_id), rank, world, ctypes.byref(rendezvous))
        options = ExecutorOptions(ctypes.sizeof(ExecutorOptions), self._plan, device, rendezvous, None, rank)
        self._call("refit_executor_create", ctypes.byref(options), ctypes.byref(self._executor))
        self._call("refit_executor_connect", self._executor, ctypes.c_int64(self._timeout_ms))
        tensors = (Tensor * len(self._tensors))(*self._tensors)
        self._call("refit_executor_bind", self._executor, tensors, ctypes.c_size_t(len(tensors)), ctypes.c_int64(self._timeout_ms))

    def _add(self, pointer, _):
        given = pointer.contents  # its strings are the visitor's, so they are copied
        shape = tuple(given.shape[i] for i in range(given.dimensions))
        name = given.name.decode()
        array = self.buffers[name] = np.zeros(shape, DTYPES[given.dtype])
        self._tensors.append(Tensor(ctypes.sizeof(Tensor), name.encode(), array.ctypes.data, array.nbytes,
                                    (ctypes.c_uint64 * len(shape))(*shape), len(shape), given.dtype))

    def run(self, check=False):
        """One refit from the buffers; returns when the new weights are in place on all ranks."""
        options = RunOptions(ctypes.sizeof(RunOptions), self._timeout_ms, None, 0, check)
        self._call("refit_executor_run", self._executor, None, ctypes.byref(options))
        self._call("refit_executor_wait", self._executor)

    def close(self):
        self._library.refit_executor_free(self._executor)

    def _call(self, name, *arguments):
        function = getattr(self._library, name)
        function.restype = ctypes.c_void_p
        status = function(*arguments)
        if status:
            message = self._library.refit_status_message(ctypes.c_void_p(status)).decode()
            self._library.refit_status_free(ctypes.c_void_p(status))
            raise RuntimeError(message)


def unique_id(library):
    """The 128 bytes by which all ranks meet. The process that makes them is rank 0."""
    found = ctypes.create_string_buffer(BYTES)
    made = ctypes.CDLL(os.fspath(library)).refit_unique_id_create
    made.restype = ctypes.c_void_p
    if made(found):
        raise RuntimeError("no unique id: is REFIT_HOST an address of this host?")
    return found.raw
