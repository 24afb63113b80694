// refit._core: the C++ API as Python sees it. It checks and converts, nothing
// else; the package around it (python/refit) is what users import.
#include <nanobind/nanobind.h>

#include <exception>
#include <optional>
#include <string>

#include "python/src/bindings.h"
#include "python/src/status.h"

namespace nb = nanobind;

namespace {

// A signal that is pending would interrupt the first Python function called
// here. It comes first, and what it raises is raised with `status` as context.
void Raise(const absl::Status& status) {
  std::optional<nb::python_error> interrupted;
  if (PyErr_CheckSignals() != 0) interrupted.emplace();
  const auto message = status.message();
  nb::object exception =
      nb::module_::import_("refit.errors")
          .attr("from_status")(static_cast<int>(status.code()),
                               nb::str(message.data(), message.size()));
  if (!interrupted.has_value()) {
    PyErr_SetObject(exception.type().ptr(), exception.ptr());
    return;
  }
  PyException_SetContext(interrupted->value().ptr(), exception.release().ptr());
  interrupted->restore();
}

}  // namespace

NB_MODULE(_core, module) {
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        try {
          std::rethrow_exception(pointer);
        } catch (const refit::python::StatusError& error) {
          Raise(error.status);
        }
      });
  module.attr("version") = REFIT_VERSION;
#ifdef REFIT_CUDA_BUILT
  module.attr("cuda_built") = true;
#else
  module.attr("cuda_built") = false;
#endif
  refit::python::BindPlan(module);
  refit::python::BindExecutor(module);
  refit::python::BindLog(module);
}
