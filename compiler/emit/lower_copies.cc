#include "compiler/emit/lower_copies.h"

#include <string>

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

CopyLowering::CopyLowering(const Module& module)
    : module_(module),
      pack_lists_(module.contents.size()),
      relay_lists_(module.contents.size()),
      unpack_lists_(module.contents.size()) {
  ListPieces();
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    buffers_of_rank_.push_back(AddRankBuffers(module.buffers_of(Rank{rank})));
  }
}

void CopyLowering::ListPieces() {
  pieces_.reserve(module_.pieces.size());
  const Piece* last = nullptr;  // pieces in a row are often parts of one box
  for (const Piece& piece : module_.pieces) {
    int32_t box = 0;
    if (last != nullptr && last->param == piece.param &&
        last->destination_box == piece.destination_box) {
      box = pieces_.back().box;
    } else {
      box = boxes_
                .try_emplace({piece.param, piece.destination_box},
                             static_cast<int32_t>(boxes_.size()))
                .first->second;
    }
    pieces_.push_back({.param = piece.param,
                       .wave = piece.wave,
                       .box = box,
                       .wire_dtype = piece.wire_dtype});
    last = &piece;
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
    const auto elements = static_cast<uint64_t>(Product(buffer.shape));
    for (const Fragment& fragment : buffer.fragments) {
      const Site site = {.slot = static_cast<uint32_t>(slot),
                         .buffer = &buffer,
                         .fragment = &fragment,
                         .tensor_elements = elements,
                         .last_loops = {}};
      held.sites_by_param[IndexOf(fragment.param)].push_back(site);
      const auto box = boxes_.find({fragment.param, fragment.box});
      if (box != boxes_.end()) held.sites_by_box[box->second].push_back(site);
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

void CopyLowering::AddLoop(int64_t extent, int64_t stride,
                           uint64_t tensor_elements, Loops& loops) {
  if (extent == 1) return;
  const fb::Loop loop(static_cast<uint64_t>(extent),
                      static_cast<uint64_t>(stride));
  if (!loops.empty() && CanMerge(loops.back(), loop, tensor_elements)) {
    loops.back() =
        fb::Loop(loops.back().extent() * loop.extent(), loop.stride());
  } else {
    loops.push_back(loop);
  }
}

fb::Copy CopyLowering::LowerPacked(Site& site, const Packed& packed,
                                   DType wire_dtype) {
  const Fragment& fragment = *site.fragment;
  const size_t dims = packed.box.lo.size();
  const int64_t* const lo = packed.box.lo.data();
  const int64_t* const hi = packed.box.hi.data();
  const int64_t* const first = fragment.box.lo.data();
  const int64_t* const stride = fragment.stride.data();
  int64_t offset = fragment.offset;
  Loops loops;
  for (size_t dim = 0; dim < dims; ++dim) {
    offset += (lo[dim] - first[dim]) * stride[dim];
    AddLoop(hi[dim] - lo[dim], stride[dim], site.tensor_elements, loops);
  }
  // Equal loops have one number, so that the last one's is right for this.
  if (loops.empty() || BytesOf(absl::MakeConstSpan(loops)) !=
                           BytesOf(absl::MakeConstSpan(site.last_loops))) {
    site.last_loops_begin = InternLoops(loops);
    site.last_loops = loops;
  }
  return fb::Copy(site.slot, site.last_loops_begin,
                  static_cast<uint16_t>(loops.size()), wire_dtype,
                  /*reserved=*/0, /*reserved2=*/0,
                  static_cast<uint64_t>(offset),
                  static_cast<uint64_t>(packed.staging_offset));
}

CopyLowering::Site* CopyLowering::FindContaining(RankBuffers& held,
                                                 const PieceFacts& piece,
                                                 const Box& box) {
  const size_t param = IndexOf(piece.param);
  std::vector<Site>& sites = held.sites_by_param[param];
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
  uint32_t& number = pack_lists_.At(held, contents);
  if (number != ListsOfContents::kNone) return number;
  list_.clear();
  for (const Packed& packed : module_.contents[static_cast<size_t>(contents)]) {
    const PieceFacts& piece = pieces_[IndexOf(packed.piece)];
    Site* const site = FindContaining(rank_buffers_[held], piece, packed.box);
    if (site == nullptr) {
      return absl::InternalError(
          absl::StrCat("rank ", IndexOf(source), " does not hold the part of ",
                       module_.param(piece.param).name, " that it is to send"));
    }
    list_.push_back(LowerPacked(*site, packed, piece.wire_dtype));
  }
  return number = InternList(list_);
}

std::vector<CopyLowering::Site>* CopyLowering::FindWritten(
    RankBuffers& held, const PieceFacts& piece) {
  const auto sites = held.sites_by_box.find(piece.box);
  return sites == held.sites_by_box.end() ? nullptr : &sites->second;
}

absl::StatusOr<uint32_t> CopyLowering::Relay(Rank relay, int32_t contents) {
  const size_t held = buffers_of_rank_[IndexOf(relay)];
  uint32_t& number = relay_lists_.At(held, contents);
  if (number != ListsOfContents::kNone) return number;
  list_.clear();
  for (const Packed& packed : module_.contents[static_cast<size_t>(contents)]) {
    const PieceFacts& piece = pieces_[IndexOf(packed.piece)];
    std::vector<Site>* const sites = FindWritten(rank_buffers_[held], piece);
    Site* uncast = nullptr;
    for (size_t i = 0; sites != nullptr && i < sites->size(); ++i) {
      if ((*sites)[i].buffer->dtype == piece.wire_dtype) uncast = &(*sites)[i];
    }
    if (uncast == nullptr) {
      return absl::InternalError(absl::StrCat(
          "rank ", IndexOf(relay), " does not receive the part of ",
          module_.param(piece.param).name, " that it is to relay"));
    }
    list_.push_back(LowerPacked(*uncast, packed, piece.wire_dtype));
  }
  return number = InternList(list_);
}

absl::StatusOr<uint32_t> CopyLowering::Unpack(Rank destination,
                                              int32_t contents) {
  const size_t held = buffers_of_rank_[IndexOf(destination)];
  uint32_t& number = unpack_lists_.At(held, contents);
  if (number != ListsOfContents::kNone) return number;
  list_.clear();
  for (const Packed& packed : module_.contents[static_cast<size_t>(contents)]) {
    const PieceFacts& piece = pieces_[IndexOf(packed.piece)];
    std::vector<Site>* const sites = FindWritten(rank_buffers_[held], piece);
    if (sites == nullptr) {
      return absl::InternalError(absl::StrCat(
          "rank ", IndexOf(destination), " does not hold the part of ",
          module_.param(piece.param).name, " that it is to receive"));
    }
    for (Site& site : *sites) {
      list_.push_back(LowerPacked(site, packed, piece.wire_dtype));
    }
  }
  return number = InternList(list_);
}

uint32_t CopyLowering::Fill(Rank rank) {
  const RankBuffers& held = rank_buffers_[buffers_of_rank_[IndexOf(rank)]];
  std::vector<fb::Copy> copies;
  for (size_t slot = 0; slot < held.buffers.size(); ++slot) {
    const Buffer& buffer = module_.buffers[held.buffers[slot]];
    for (const Region& region : buffer.regions) {
      if (region.kind != fb::RegionKind::kFill) continue;
      Loops loops;
      for (size_t dim = 0; dim < region.extent.size(); ++dim) {
        AddLoop(region.extent[dim], region.stride[dim],
                static_cast<uint64_t>(Product(buffer.shape)), loops);
      }
      copies.emplace_back(static_cast<uint32_t>(slot), InternLoops(loops),
                          static_cast<uint16_t>(loops.size()), buffer.dtype,
                          /*reserved=*/0, /*reserved2=*/0,
                          static_cast<uint64_t>(region.offset),
                          /*staging_offset=*/0);
    }
  }
  return InternList(copies);
}

}  // namespace refit
