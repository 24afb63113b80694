#include "compiler/emit/lower_copies.h"

#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace refit {
namespace {

template <typename Struct>
absl::string_view BytesOf(absl::Span<const Struct> structs) {
  return {reinterpret_cast<const char*>(structs.data()),
          structs.size() * sizeof(Struct)};
}

// Two loops become one where the outer continues the inner. A loop over the
// tensors of a stack and a loop inside a tensor stay apart: the executor turns
// the one into strides of table entries and the other into strides of bytes.
bool CanMerge(const fb::Loop& outer, const fb::Loop& inner,
              uint64_t tensor_elements) {
  return outer.stride() == inner.extent() * inner.stride() &&
         (outer.stride() >= tensor_elements) ==
             (inner.stride() >= tensor_elements);
}

}  // namespace

CopyLowering::CopyLowering(const Module& module) : module_(module) {
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    buffers_of_rank_.push_back(AddRankBuffers(module.buffers_of(Rank{rank})));
  }
}

size_t CopyLowering::AddRankBuffers(const std::vector<BufferId>& buffers) {
  const auto [it, is_new] =
      rank_buffers_ids_.try_emplace(buffers, rank_buffers_.size());
  if (!is_new) return it->second;
  RankBuffers held;
  held.buffers = buffers;
  held.sites_by_param.resize(module_.params.size());
  held.last_packed_site.resize(module_.params.size(), 0);
  for (size_t slot = 0; slot < buffers.size(); ++slot) {
    const Buffer& buffer = module_.buffers[buffers[slot]];
    for (const Fragment& fragment : buffer.fragments) {
      const Site site = {.slot = static_cast<uint32_t>(slot),
                         .buffer = &buffer,
                         .fragment = &fragment};
      held.sites_by_param[IndexOf(fragment.param)].push_back(site);
      held.sites_by_box[{fragment.param, fragment.box}].push_back(site);
    }
  }
  rank_buffers_.push_back(std::move(held));
  return it->second;
}

uint32_t CopyLowering::InternLoops(absl::Span<const fb::Loop> loops) {
  const absl::string_view bytes = BytesOf(loops);
  const auto known = loops_by_bytes_.find(bytes);
  if (known != loops_by_bytes_.end()) return known->second;
  const auto number = static_cast<uint32_t>(loops_.size());
  loops_by_bytes_.emplace(bytes, number);
  loops_.insert(loops_.end(), loops.begin(), loops.end());
  return number;
}

uint32_t CopyLowering::InternList(absl::Span<const fb::Copy> copies) {
  const absl::string_view bytes = BytesOf(copies);
  const auto known = lists_by_bytes_.find(bytes);
  if (known != lists_by_bytes_.end()) return known->second;
  const auto number = static_cast<uint32_t>(lists_.size());
  lists_by_bytes_.emplace(bytes, number);
  lists_.emplace_back(static_cast<uint32_t>(copies_.size()),
                      static_cast<uint32_t>(copies.size()));
  copies_.insert(copies_.end(), copies.begin(), copies.end());
  return number;
}

fb::Copy CopyLowering::Lower(uint32_t slot, const Buffer& buffer,
                             int64_t offset, const Dims& extent,
                             const Dims& stride, DType wire_dtype,
                             int64_t staging_offset) {
  const uint64_t tensor_elements = static_cast<uint64_t>(Product(buffer.shape));
  absl::InlinedVector<fb::Loop, 8> loops;
  for (size_t dim = 0; dim < extent.size(); ++dim) {
    if (extent[dim] == 1) continue;
    const fb::Loop loop(static_cast<uint64_t>(extent[dim]),
                        static_cast<uint64_t>(stride[dim]));
    if (!loops.empty() && CanMerge(loops.back(), loop, tensor_elements)) {
      loops.back() =
          fb::Loop(loops.back().extent() * loop.extent(), loop.stride());
    } else {
      loops.push_back(loop);
    }
  }
  return fb::Copy(
      slot, InternLoops(loops), static_cast<uint16_t>(loops.size()), wire_dtype,
      /*reserved=*/0, /*reserved2=*/0, static_cast<uint64_t>(offset),
      static_cast<uint64_t>(staging_offset));
}

fb::Copy CopyLowering::LowerPacked(const Site& site, const Packed& packed) {
  const Fragment& fragment = *site.fragment;
  int64_t offset = fragment.offset;
  Dims extent;
  for (size_t dim = 0; dim < packed.box.lo.size(); ++dim) {
    offset +=
        (packed.box.lo[dim] - fragment.box.lo[dim]) * fragment.stride[dim];
    extent.push_back(packed.box.extent(dim));
  }
  return Lower(site.slot, *site.buffer, offset, extent, fragment.stride,
               module_.piece(packed.piece).wire_dtype, packed.staging_offset);
}

const CopyLowering::Site* CopyLowering::FindContaining(RankBuffers& held,
                                                       const Piece& piece,
                                                       const Box& box) {
  const size_t param = IndexOf(piece.param);
  const std::vector<Site>& sites = held.sites_by_param[param];
  size_t& last = held.last_packed_site[param];
  for (size_t tried = 0; tried < sites.size(); ++tried) {
    const int32_t wave = sites[last].buffer->wave;
    if ((wave == kNoWave || wave == piece.wave) &&
        Contains(sites[last].fragment->box, box)) {
      return &sites[last];
    }
    last = (last + 1) % sites.size();
  }
  return nullptr;
}

absl::StatusOr<uint32_t> CopyLowering::Pack(Rank source, int32_t contents) {
  const size_t held = buffers_of_rank_[IndexOf(source)];
  const auto known = pack_lists_.find({held, contents});
  if (known != pack_lists_.end()) return known->second;
  list_.clear();
  for (const Packed& packed : module_.contents[static_cast<size_t>(contents)]) {
    const Piece& piece = module_.piece(packed.piece);
    const Site* site = FindContaining(rank_buffers_[held], piece, packed.box);
    if (site == nullptr) {
      return absl::InternalError(
          absl::StrCat("rank ", IndexOf(source), " does not hold the part of ",
                       module_.param(piece.param).name, " that it is to send"));
    }
    list_.push_back(LowerPacked(*site, packed));
  }
  return pack_lists_[{held, contents}] = InternList(list_);
}

const std::vector<CopyLowering::Site>* CopyLowering::FindWritten(
    const RankBuffers& held, const Piece& piece) const {
  const auto sites =
      held.sites_by_box.find({piece.param, piece.destination_box});
  return sites == held.sites_by_box.end() ? nullptr : &sites->second;
}

absl::StatusOr<uint32_t> CopyLowering::Relay(Rank relay, int32_t contents) {
  const size_t held = buffers_of_rank_[IndexOf(relay)];
  const auto known = relay_lists_.find({held, contents});
  if (known != relay_lists_.end()) return known->second;
  list_.clear();
  for (const Packed& packed : module_.contents[static_cast<size_t>(contents)]) {
    const Piece& piece = module_.piece(packed.piece);
    const std::vector<Site>* sites = FindWritten(rank_buffers_[held], piece);
    const Site* uncast = nullptr;
    for (size_t i = 0; sites != nullptr && i < sites->size(); ++i) {
      if ((*sites)[i].buffer->dtype == piece.wire_dtype) uncast = &(*sites)[i];
    }
    if (uncast == nullptr) {
      return absl::InternalError(absl::StrCat(
          "rank ", IndexOf(relay), " does not receive the part of ",
          module_.param(piece.param).name, " that it is to relay"));
    }
    list_.push_back(LowerPacked(*uncast, packed));
  }
  return relay_lists_[{held, contents}] = InternList(list_);
}

absl::StatusOr<uint32_t> CopyLowering::Unpack(Rank destination,
                                              int32_t contents) {
  const size_t held = buffers_of_rank_[IndexOf(destination)];
  const auto known = unpack_lists_.find({held, contents});
  if (known != unpack_lists_.end()) return known->second;
  list_.clear();
  for (const Packed& packed : module_.contents[static_cast<size_t>(contents)]) {
    const Piece& piece = module_.piece(packed.piece);
    const std::vector<Site>* sites = FindWritten(rank_buffers_[held], piece);
    if (sites == nullptr) {
      return absl::InternalError(absl::StrCat(
          "rank ", IndexOf(destination), " does not hold the part of ",
          module_.param(piece.param).name, " that it is to receive"));
    }
    for (const Site& site : *sites) {
      list_.push_back(LowerPacked(site, packed));
    }
  }
  return unpack_lists_[{held, contents}] = InternList(list_);
}

uint32_t CopyLowering::Fill(Rank rank) {
  const RankBuffers& held = rank_buffers_[buffers_of_rank_[IndexOf(rank)]];
  std::vector<fb::Copy> copies;
  for (size_t slot = 0; slot < held.buffers.size(); ++slot) {
    const Buffer& buffer = module_.buffers[held.buffers[slot]];
    for (const Region& region : buffer.regions) {
      if (region.kind != fb::RegionKind::kFill) continue;
      copies.push_back(Lower(static_cast<uint32_t>(slot), buffer, region.offset,
                             region.extent, region.stride, buffer.dtype,
                             /*staging_offset=*/0));
    }
  }
  return InternList(copies);
}

}  // namespace refit
