// What work costs beside the bytes on links, as measured on H200s
// (docs/benchmarks.md).
#ifndef REFIT_SIMULATOR_COSTS_H_
#define REFIT_SIMULATOR_COSTS_H_

namespace refit::simulator {

// A direct round: two fences, and the launch of a kernel.
inline constexpr double kDirectRoundSeconds = 20e-6;
// A round between hosts: packing, launch and rendezvous. The compiler's
// (compiler/ir/limits.h).
inline constexpr double kNetworkRoundSeconds = 120e-6;
// How much later than the rank before it a rank passes on what is broadcast:
// what NCCL counts for each step of a broadcast between hosts, a chunk of 256
// KiB included (hwLat of src/graph/tuning.cc at 01afd20a, where a ring takes
// the tree's). No wire of ours measured it.
inline constexpr double kBroadcastHopSeconds = 50e-6;
// A staged round inside a host, and each of its messages: the compiler's.
inline constexpr double kPeerRoundSeconds = 13e-6;
inline constexpr double kPeerMessageSeconds = 12e-6;
// A message of a rank that quantizes. It packs what is just ready, beside
// quantization: this slows it down.
inline constexpr double kQuantizedMessageSeconds = 130e-6;
// One of a rank that relays, and one that is dealt out beside messages between
// hosts. Their senders receive meanwhile, which slows them down: among four
// H100s, of which three received from three others, messages of 32 and 85 MiB
// took 12 and 23 us more than their bytes. The compiler counts as much of what
// is dealt out (compiler/ir/limits.h).
inline constexpr double kDealtMessageSeconds = 20e-6;
// A copy inside one H200 moves about 4.3 TB/s counting reads and writes.
inline constexpr double kLocalBytesPerSecond = 2e12;
// Of blocks, from bf16.
inline constexpr double kQuantizedElementsPerSecond = 1200e9;
// The same where a copy inside a host does it: it reads two bytes for each that
// it stores. A kernel that only does that moves 2.8 TB/s in the memory of an
// H100.
inline constexpr double kFusedElementsPerSecond = 2835e9 / 3;
// Links of a rank, each way, as jobs assume: NVLink of an H200, and a NIC of
// 400 Gb/s.
inline constexpr double kPeerBytesPerSecond = 370e9;
inline constexpr double kNetworkBytesPerSecond = 50e9;
// One core of a CPU that packs or unpacks, and a round over UCX and TCP.
inline constexpr double kCpuCopyBytesPerSecond = 2e9;
inline constexpr double kCpuRoundSeconds = 120e-6;
// Between two processes of a host over UCX's shared memory: 402 MB took 95 ms
// on a Xeon at 2.5 GHz. Ranks of a colocated job go the same way.
inline constexpr double kCpuPeerBytesPerSecond = 4e9;
// Of blocks, from bf16: one core of that CPU took 2.2 s for 201 million.
inline constexpr double kCpuQuantizedElementsPerSecond = 90e6;

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_COSTS_H_
