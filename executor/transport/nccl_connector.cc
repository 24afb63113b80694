#include "executor/transport/nccl_connector.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "control/compared_structs.h"
#include "control/waiting.h"
#include "executor/device/hardware_queues.h"
#include "executor/device/host_identity.h"
#include "executor/device/process_identity.h"
#include "executor/transport/host_comparison.h"

namespace refit {
namespace {

constexpr std::chrono::microseconds kWaitPause(20);

bool IsStaged(const Edge& edge) {
  return edge.mechanism == fb::Mechanism::kStaged;
}

// Between ranks of one domain.
bool IsInside(const Edge& edge) { return edge.route != fb::Route::kNetwork; }

constexpr char kComparingHosts[] = "comparing hosts";
constexpr char kMakingId[] = "making an NCCL id";
constexpr char kConnectingFence[] = "connecting the fence";

constexpr char kEncryptionVariable[] = "REFIT_NCCL_ENCRYPTION";

absl::StatusOr<bool> IsEncryptionWanted() {
  const char* const value = std::getenv(kEncryptionVariable);
  const std::string text = value != nullptr ? value : "0";
  if (text == "0" || text == "1") return text == "1";
  return absl::InvalidArgumentError(absl::StrCat(
      kEncryptionVariable, " is \"", text, "\", it should be 0 or 1"));
}

// What the ranks that load NCCL must have in common.
struct NcclSettings {
  int32_t version = 0;  // 0: this rank does not load it
  bool encrypts = false;

  static auto FieldsOf(auto& self) {
    return std::tie(self.version, self.encrypts);
  }
};

// What a root tells those to which it broadcasts.
struct BroadcastGroup {
  nccl::UniqueId id = {};
  std::vector<int32_t> ranks;  // its own too, ascending

  static auto FieldsOf(auto& self) { return std::tie(self.id, self.ranks); }
};

// Where a rank runs, and what it does there.
struct Place {
  std::string host;
  std::string host_name;
  std::string gpu;  // Device::Identity
  ProcessIdentity process;
  bool stages_inside = false;

  static auto FieldsOf(auto& self) {
    return std::tie(self.host, self.host_name, self.gpu, self.process.process,
                    self.process.random, self.stages_inside);
  }
};

// An error where a direct refit could not end: whatever the plan says of GPUs,
// what `rank` waits for would stand behind its wait.
absl::Status CheckConnections(int32_t rank, absl::Span<const Edge> edges,
                              const std::vector<Place>& places) {
  const Place& mine = places[static_cast<size_t>(rank)];
  if (mine.gpu.empty() || !HasOneHardwareQueue()) return absl::OkStatus();
  for (const Edge& edge : edges) {
    const Place& theirs = places[static_cast<size_t>(edge.peer)];
    if (IsStaged(edge) || theirs.gpu != mine.gpu ||
        theirs.process != mine.process) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "ranks ", std::min(rank, edge.peer), " and ", std::max(rank, edge.peer),
        " share a GPU and are threads of one process, where "
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: what one of them waits for would "
        "stand behind its wait. Unset it (CUDA's default is 8), or give each "
        "rank a process or a GPU of its own"));
  }
  return absl::OkStatus();
}

// What peers in direct rounds need of a rank.
struct FenceExports {
  std::string fence;  // DeviceFence::Export
  std::string use;    // MemoryUse::Export

  static auto FieldsOf(auto& self) { return std::tie(self.fence, self.use); }
};

}  // namespace

absl::Status NcclConnector::Connect(absl::Span<const Edge> edges,
                                    NcclLinks& links) {
  Uses mine;
  for (const Edge& edge : edges) {
    (!IsStaged(edge)   ? mine.fence
     : IsInside(edge)  ? mine.domain
     : edge.broadcasts ? mine.broadcasts
                       : mine.world) = true;
  }
  const auto uses = Compare(CheckEdges(edges), mine, "connecting");
  if (!uses.ok()) return uses.status();
  const auto any = [&](auto member) {
    return std::any_of(uses->begin(), uses->end(), [&](const auto& of_rank) {
      return of_rank.value.*member;
    });
  };
  const bool has_domains = any(&Uses::domain);
  const bool has_world = any(&Uses::world);
  const bool broadcasts = any(&Uses::broadcasts);
  const std::vector<int32_t> everyone = Everyone();
  const std::vector<int32_t> neighbours = RanksOfThisHost();

  bool has_domain = false;
  absl::StatusOr<std::vector<std::string>> notices =
      CheckHosts(edges, neighbours, mine.domain, has_domain);
  if (!notices.ok()) return notices.status();
  links.notices = *std::move(notices);
  if (has_domains || has_world || broadcasts) {
    absl::Status status =
        AgreeOnVersion(has_domain || has_world || mine.broadcasts);
    if (!status.ok()) return status;
  }
  // One after the other; all domains at once, since they share no rank.
  const auto make = [&](const std::vector<int32_t>& ranks, bool takes_part,
                        bool inside,
                        std::shared_ptr<NcclCommunicator>& target) {
    absl::Status status = CreateCommunicator(ranks, takes_part, target);
    if (!status.ok()) return status;
    std::vector<Edge> touched;
    for (const Edge& edge : edges) {
      if (IsStaged(edge) && IsInside(edge) == inside && !edge.broadcasts) {
        touched.push_back(edge);
      }
    }
    if (target != nullptr) {
      status = Touch(
          [&](std::byte* scratch, Stream stream) {
            return target->TouchInTurns(touched, rank(), scratch, stream,
                                        deadline_, interruption_);
          },
          links.unended);
    }
    return Agree(status, "touching the edges");
  };
  absl::Status status;
  if (has_domains) status = make(neighbours, has_domain, true, links.domain);
  if (status.ok() && has_world) {
    status = make(everyone, true, false, links.world);
  }
  if (status.ok() && broadcasts) status = CreateBroadcasts(edges, links);
  if (!status.ok()) return status;
  return any(&Uses::fence) ? ConnectFence(edges, links) : absl::OkStatus();
}

// The others fail with this rank's error, if it comes with one.
absl::Status NcclConnector::OrAbort(const absl::Status& mine) {
  if (!mine.ok()) control_.Abort(mine);
  return mine;
}

// What ranks say, if none of them comes with an error.
template <typename Struct>
absl::StatusOr<std::vector<OfRank<Struct>>> NcclConnector::Compare(
    const absl::Status& mine, const Struct& value, const char* what) {
  if (absl::Status s = OrAbort(mine); !s.ok()) return s;
  return CompareStructs(control_, value, what, deadline_);
}

absl::Status NcclConnector::Agree(const absl::Status& mine, const char* what) {
  if (absl::Status s = OrAbort(mine); !s.ok()) return s;
  return control_.Compare("", what, deadline_).status();
}

absl::Status NcclConnector::CheckEdges(absl::Span<const Edge> edges) const {
  const auto ranks = static_cast<int32_t>(hosts_.size());
  for (const Edge& edge : edges) {
    if (edge.peer < 0 || edge.peer >= ranks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "peer ", edge.peer, " is not one of the ", ranks, " ranks"));
    }
    const uint32_t mine = hosts_[static_cast<size_t>(rank())];
    const uint32_t theirs = hosts_[static_cast<size_t>(edge.peer)];
    if (!IsInside(edge) || mine == theirs) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank(), " is on host ", mine, " and rank ",
                     edge.peer, " on host ", theirs,
                     ", but the plan's route between them stays inside a "
                     "host"));
  }
  return absl::OkStatus();
}

// The plan's hosts and GPUs against those that ranks run on. An error where
// this rank's direct rounds would cross hosts, which nothing can map memory
// over; else what differs is for the user to know: staged rounds are right
// wherever ranks are. A rank hears of its neighbours and peers; rank 0 hears of
// all, and tells all how the hosts differ. `has_domain`: whether neighbours, or
// this rank, stage inside the host.
absl::StatusOr<std::vector<std::string>> NcclConnector::CheckHosts(
    absl::Span<const Edge> edges, const std::vector<int32_t>& neighbours,
    bool stages_inside, bool& has_domain) {
  std::set<int32_t> distinct(neighbours.begin(), neighbours.end());
  for (const Edge& edge : edges) distinct.insert(edge.peer);
  const std::vector<int32_t> near(distinct.begin(), distinct.end());
  distinct.insert(0);
  const std::vector<int32_t> to(distinct.begin(), distinct.end());
  const std::vector<int32_t> from = rank() == 0 ? Everyone() : near;
  const Place mine = {host_, ThisHostName(), device_.Identity(), ThisProcess(),
                      stages_inside};
  const absl::StatusOr<std::vector<std::string>> told = control_.Exchange(
      StructBytes(mine), to, from, kComparingHosts, deadline_);
  if (!told.ok()) return told.status();
  std::vector<Place> places(hosts_.size());
  std::vector<std::string> real(hosts_.size());
  std::vector<std::string> names(hosts_.size());
  std::vector<std::string> gpus(hosts_.size());
  absl::Status status;
  for (size_t i = 0; i < from.size(); ++i) {
    const absl::StatusOr<Place> place =
        ReadStruct<Place>((*told)[i], from[i], kComparingHosts);
    status = place.status();
    if (!status.ok()) break;
    const auto of = static_cast<size_t>(from[i]);
    places[of] = *place;
    real[of] = place->host;
    names[of] = place->host_name;
    gpus[of] = place->gpu;
    has_domain |= place->stages_inside &&
                  hosts_[of] == hosts_[static_cast<size_t>(rank())];
  }
  if (absl::Status s = OrAbort(status); !s.ok()) return s;
  const absl::StatusOr<std::string> lines = FromFirst(
      Everyone(),
      rank() == 0 ? StructBytes(CompareHosts(hosts_, real, names)) : "",
      kComparingHosts);
  if (!lines.ok()) return lines.status();
  absl::StatusOr<std::vector<std::string>> notices =
      ReadStruct<std::vector<std::string>>(*lines, 0, kComparingHosts);
  status = notices.status();
  for (const Edge& edge : edges) {
    const std::string& theirs = real[static_cast<size_t>(edge.peer)];
    if (!status.ok() || IsStaged(edge) || theirs == host_) continue;
    // A line tells what helps, though it may be of other ranks.
    status = absl::FailedPreconditionError(absl::StrCat(
        "the plan stores directly between rank ", rank(), " on \"",
        ThisHostName(), "\" and rank ", edge.peer, " on \"",
        names[static_cast<size_t>(edge.peer)], "\", which are two hosts: ",
        absl::StrJoin(absl::MakeSpan(*notices).subspan(0, 1), "")));
  }
  if (status.ok()) status = CheckConnections(rank(), edges, places);
  status = Agree(status, kComparingHosts);
  if (!status.ok()) return status;
  for (std::string& line : CompareGpus(rank(), edges, gpus)) {
    notices->push_back(std::move(line));
  }
  return notices;
}

// Loads NCCL on the ranks that take part, and compares its versions there.
absl::Status NcclConnector::AgreeOnVersion(bool takes_part) {
  absl::Status status;
  if (takes_part && !api_.has_value()) {
    absl::StatusOr<nccl::Api> api = nccl::Load();
    status = api.status();
    if (api.ok()) api_ = *std::move(api);
  }
  absl::StatusOr<bool> encrypts = IsEncryptionWanted();
  status.Update(encrypts.status());
  NcclSettings mine;
  if (status.ok() && takes_part) mine = {api_->version, *encrypts};
  const auto settings = Compare(status, mine, "loading NCCL");
  if (!settings.ok()) return settings.status();
  const auto first =
      std::find_if(settings->begin(), settings->end(),
                   [](const auto& s) { return s.value.version != 0; });
  const auto differs = [&](const char* what, auto text, auto member) {
    const auto other = std::find_if(first, settings->end(), [&](const auto& s) {
      return s.value.version != 0 && s.value.*member != first->value.*member;
    });
    if (other == settings->end()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(what, " differs: ", text(first->value.*member),
                     " on rank ", first->rank, ", ", text(other->value.*member),
                     " on rank ", other->rank));
  };
  if (first == settings->end()) return absl::OkStatus();
  status = differs("NCCL version", nccl::VersionText, &NcclSettings::version);
  if (!status.ok()) return status;
  status = differs(
      kEncryptionVariable, [](bool on) { return on ? "1" : "0"; },
      &NcclSettings::encrypts);
  if (!status.ok() || !first->value.encrypts) return status;
  return Agree(mine.encrypts ? Encrypt() : absl::OkStatus(),
               "giving NCCL its key");
}

// Before the first unique id is made. The key is the process's, and stays: NCCL
// takes the same one again from another rank or a later Connect.
absl::Status NcclConnector::Encrypt() {
  if (api_->version < nccl::EncryptionConfig::kEncryptionVersion ||
      api_->SetEncryption == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat(kEncryptionVariable, " is 1, but NCCL ",
                     nccl::VersionText(api_->version), " (", api_->library,
                     ") cannot encrypt, 2.32 or later can"));
  }
  const std::string key = control_.SharedKey("NCCL");
  if (key.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        kEncryptionVariable,
        " is 1, but the ranks have met without a secret, from which NCCL's "
        "key follows: set REFIT_SECRET, or use a unique id"));
  }
  nccl::EncryptionConfig config;
  config.key = key.c_str();
  return nccl::StatusOf(*api_, api_->SetEncryption(&config),
                        "ncclSetEncryption", nullptr);
}

std::vector<int32_t> NcclConnector::Everyone() const {
  std::vector<int32_t> ranks(hosts_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// What the first of `ranks` gives to all of them, of which this rank is one; ""
// if there are none. Collective over all ranks.
absl::StatusOr<std::string> NcclConnector::FromFirst(
    absl::Span<const int32_t> ranks, std::string_view mine, const char* what) {
  const absl::Span<const int32_t> from = ranks.subspan(0, 1);
  const bool gives = !from.empty() && from.front() == rank();
  const absl::StatusOr<std::vector<std::string>> given = control_.Exchange(
      mine, gives ? ranks : absl::Span<const int32_t>(), from, what, deadline_);
  if (!given.ok()) return given.status();
  return given->empty() ? "" : given->front();
}

std::vector<int32_t> NcclConnector::RanksOfThisHost() const {
  std::vector<int32_t> ranks;
  for (size_t r = 0; r < hosts_.size(); ++r) {
    if (hosts_[r] == hosts_[static_cast<size_t>(rank())]) {
      ranks.push_back(static_cast<int32_t>(r));
    }
  }
  return ranks;
}

absl::Status NcclConnector::MakeId(bool makes, nccl::UniqueId& id) {
  if (!makes) return absl::OkStatus();
  return OrAbort(nccl::StatusOf(*api_, api_->GetUniqueId(&id),
                                "ncclGetUniqueId", nullptr));
}

// Collective over all ranks; those of `ranks` get a communicator, whose id its
// lowest rank makes. Null on a rank that takes no part.
absl::Status NcclConnector::CreateCommunicator(
    const std::vector<int32_t>& ranks, bool takes_part,
    std::shared_ptr<NcclCommunicator>& target) {
  nccl::UniqueId id = {};
  absl::Status status = MakeId(takes_part && ranks.front() == rank(), id);
  if (!status.ok()) return status;
  const absl::StatusOr<std::string> given = FromFirst(
      takes_part ? ranks : std::vector<int32_t>(), StructBytes(id), kMakingId);
  if (!given.ok()) return given.status();
  if (takes_part) {
    absl::StatusOr<nccl::UniqueId> theirs =
        ReadStruct<nccl::UniqueId>(*given, ranks.front(), kMakingId);
    status = theirs.status();
    if (theirs.ok()) {
      target = NcclCommunicator::Unmade(*api_, ranks);
      status = target->Init(*theirs, rank(), deadline_, interruption_);
    }
  }
  return Agree(status, "making an NCCL communicator");
}

// Collective over all ranks: a communicator for each rank that broadcasts, with
// it and those to which it does. The root gives them its id. Ranks make theirs
// in the order of roots, so that none waits in a circle.
absl::Status NcclConnector::CreateBroadcasts(absl::Span<const Edge> edges,
                                             NcclLinks& links) {
  std::set<int32_t> to, roots;
  for (const Edge& edge : edges) {
    if (!edge.broadcasts) continue;
    (edge.kind == fb::MessageKind::kSend ? to : roots).insert(edge.peer);
  }
  BroadcastGroup mine;
  absl::Status status = MakeId(/*makes=*/!to.empty(), mine.id);
  if (!status.ok()) return status;
  if (!to.empty()) {
    mine.ranks.assign(to.begin(), to.end());
    mine.ranks.insert(
        std::lower_bound(mine.ranks.begin(), mine.ranks.end(), rank()), rank());
  }
  const std::vector<int32_t> receivers(to.begin(), to.end());
  const std::vector<int32_t> senders(roots.begin(), roots.end());
  const absl::StatusOr<std::vector<std::string>> given = control_.Exchange(
      StructBytes(mine), receivers, senders, kMakingId, deadline_);
  if (!given.ok()) return given.status();
  std::map<int32_t, BroadcastGroup> groups;
  if (!to.empty()) groups[rank()] = mine;
  for (size_t i = 0; i < senders.size() && status.ok(); ++i) {
    absl::StatusOr<BroadcastGroup> group =
        ReadStruct<BroadcastGroup>((*given)[i], senders[i], kMakingId);
    status = group.status();
    if (group.ok()) groups[senders[i]] = *std::move(group);
  }
  for (const auto& [root, group] : groups) {
    if (!status.ok()) break;
    std::shared_ptr<NcclCommunicator>& target = links.broadcasts[root];
    target = NcclCommunicator::Unmade(*api_, group.ranks);
    status = target->Init(group.id, rank(), deadline_, interruption_);
  }
  status = Agree(status, "making communicators for broadcasts");
  if (!status.ok()) return status;
  if (!groups.empty()) {
    status = Touch(
        [&](std::byte* scratch, Stream stream) {
          absl::Status touched;
          for (const auto& [root, communicator] : links.broadcasts) {
            if (!touched.ok()) break;
            touched = communicator->Broadcast(scratch, /*size_bytes=*/1, root,
                                              stream, deadline_, interruption_);
          }
          return touched;
        },
        links.unended);
  }
  return Agree(status, "touching the edges");
}

absl::Status NcclConnector::Touch(
    const std::function<absl::Status(std::byte* scratch, Stream stream)>&
        enqueue,
    std::vector<NcclLinks::Touch>& unended) {
  absl::StatusOr<std::unique_ptr<DeviceMemory>> scratch =
      device_.Allocate(NcclCommunicator::kTouchBytes);
  if (!scratch.ok()) return scratch.status();
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device_.CreateStream();
  if (!stream.ok()) return stream.status();
  absl::StatusOr<std::unique_ptr<DeviceEvent>> event = device_.CreateEvent();
  if (!event.ok()) return event.status();
  absl::Status status = enqueue((*scratch)->data(), (*stream)->get());
  if (status.ok()) status = (*event)->Record((*stream)->get());
  if (status.ok()) status = Await(**event);
  if (status.ok()) return status;
  unended.push_back({.scratch = *std::move(scratch),
                     .stream = *std::move(stream),
                     .event = *std::move(event)});
  return status;
}

absl::Status NcclConnector::Await(DeviceEvent& event) {
  while (true) {
    const absl::StatusOr<bool> reached = event.Reached();
    if (!reached.ok()) return reached.status();
    if (*reached) return absl::OkStatus();
    if (absl::Status s = interruption_(); !s.ok()) return s;
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    if (std::chrono::steady_clock::now() > deadline_) {
      return absl::DeadlineExceededError(
          "touching the edges did not end before the deadline");
    }
    std::this_thread::sleep_for(kWaitPause);
  }
}

absl::StatusOr<std::unique_ptr<DeviceFence>> NcclConnector::CreateFence(
    const std::vector<int32_t>& peers, const std::vector<int32_t>& sharing,
    std::string& exported) {
  if (peers.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<DeviceFence>> fence =
      device_.CreateFence(rank(), control_.world_size(), sharing);
  if (!fence.ok()) return fence.status();
  absl::StatusOr<std::string> mine = (*fence)->Export();
  if (!mine.ok()) return mine.status();
  exported = *std::move(mine);
  return fence;
}

// Makes none on a rank without direct edges.
absl::Status NcclConnector::ConnectFence(absl::Span<const Edge> edges,
                                         NcclLinks& links) {
  std::set<int32_t> distinct;
  std::set<int32_t> local;
  for (const Edge& edge : edges) {
    if (IsStaged(edge)) continue;
    distinct.insert(edge.peer);
    if (edge.route == fb::Route::kLocal) local.insert(edge.peer);
  }
  const std::vector<int32_t> peers(distinct.begin(), distinct.end());
  const std::vector<int32_t> sharing(local.begin(), local.end());
  FenceExports mine;
  absl::StatusOr<std::unique_ptr<DeviceFence>> fence =
      CreateFence(peers, sharing, mine.fence);
  absl::Status status = fence.status();
  absl::StatusOr<std::unique_ptr<MemoryUse>> use(nullptr);
  if (status.ok() && *fence != nullptr) {
    use = MemoryUse::Create(rank(), control_.world_size());
    absl::StatusOr<std::string> exported =
        use.ok() ? (*use)->Export() : use.status();
    status = exported.status();
    if (status.ok()) mine.use = *std::move(exported);
  }
  status = Agree(status, "making the fence");
  if (!status.ok()) return status;
  const absl::StatusOr<std::vector<std::string>> told = control_.Exchange(
      StructBytes(mine), peers, peers, kConnectingFence, deadline_);
  if (!told.ok()) return told.status();
  std::vector<std::string> fences;
  std::vector<std::string> uses;
  for (size_t i = 0; i < peers.size() && status.ok(); ++i) {
    absl::StatusOr<FenceExports> theirs =
        ReadStruct<FenceExports>((*told)[i], peers[i], kConnectingFence);
    status = theirs.status();
    if (!status.ok()) break;
    fences.push_back(std::move(theirs->fence));
    uses.push_back(std::move(theirs->use));
  }
  if (status.ok() && *fence != nullptr) {
    status = (*fence)->Connect(peers, fences, deadline_);
    const absl::Status seen = (*use)->Connect(peers, uses, deadline_);
    // As in containers that share no network, or without locks of files: that
    // matters after failures alone.
    if (!seen.ok() && !absl::IsDeadlineExceeded(seen) &&
        !absl::IsCancelled(seen)) {
      links.notices.push_back(absl::StrCat(
          seen.message(),
          "; after a failed refit, free no tensors before the next connect"));
    } else {
      status.Update(seen);
    }
  }
  status = Agree(status, kConnectingFence);
  if (!status.ok() || *fence == nullptr) return status;
  links.fence = *std::move(fence);
  links.use = *std::move(use);
  return status;
}

}  // namespace refit
