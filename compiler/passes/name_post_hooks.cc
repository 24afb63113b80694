#include <optional>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// Gives the checkpoint's value back.
std::optional<PostHook> InverseOf(ValueForm form) {
  switch (form) {
    case ValueForm::kPlain:
      return std::nullopt;
    case ValueForm::kMinusOne:
      return PostHook{.name = "add-one",
                      .detail =
                          "the tensor holds the weight minus 1 as it was "
                          "moved; add 1 to it in place"};
    case ValueForm::kNegativeExp:
      return PostHook{.name = "log-of-negative",
                      .detail =
                          "the tensor holds A as it was moved; make it "
                          "log(-A) of itself in place"};
  }
  return std::nullopt;
}

// Makes it of the checkpoint's value.
std::optional<PostHook> FunctionOf(ValueForm form) {
  switch (form) {
    case ValueForm::kPlain:
      return std::nullopt;
    case ValueForm::kMinusOne:
      return PostHook{.name = "subtract-one",
                      .detail =
                          "the tensor holds the weight as it was moved, "
                          "and the norm adds 1 to it; subtract 1 from it "
                          "in place"};
    case ValueForm::kNegativeExp:
      return PostHook{.name = "negative-exp",
                      .detail =
                          "the tensor holds A_log as it was moved; make "
                          "it -exp(A_log) of itself in place"};
  }
  return std::nullopt;
}

std::vector<PostHook> HooksBetween(ValueForm source, ValueForm destination) {
  std::vector<PostHook> hooks;
  if (source == destination) return hooks;
  for (std::optional<PostHook> hook :
       {InverseOf(source), FunctionOf(destination)}) {
    if (hook.has_value()) hooks.push_back(*std::move(hook));
  }
  return hooks;
}

// By param, the form in which the source ranks have it.
std::vector<ValueForm> SourceForms(const Module& module) {
  std::vector<ValueForm> forms(module.params.size(), ValueForm::kPlain);
  for (const std::vector<BufferId>& held : module.source.ranks) {
    for (const BufferId id : held) {
      const Buffer& buffer = module.buffers[id];
      for (const Fragment& fragment : buffer.fragments) {
        forms[IndexOf(fragment.param)] = buffer.form;
      }
    }
  }
  return forms;
}

}  // namespace

absl::Status NamePostHooks(const PassOptions&, Module& module) {
  const std::vector<ValueForm> forms = SourceForms(module);
  std::vector<bool> seen(module.buffers.all().size(), false);
  for (const std::vector<BufferId>& held : module.destination.ranks) {
    for (const BufferId id : held) {
      if (seen[IndexOf(id)]) continue;
      seen[IndexOf(id)] = true;
      const Buffer& buffer = module.buffers[id];
      if (buffer.fragments.empty()) continue;
      const ValueForm form = forms[IndexOf(buffer.fragments[0].param)];
      for (const Fragment& fragment : buffer.fragments) {
        if (forms[IndexOf(fragment.param)] == form) continue;
        return absl::InternalError(
            absl::StrFormat("buffer \"%s\" holds params of which the source "
                            "has some in another "
                            "form than others",
                            buffer.name));
      }
      module.buffers.AddPostHooks(id, HooksBetween(form, buffer.form));
    }
  }
  return absl::OkStatus();
}

}  // namespace refit
