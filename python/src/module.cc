// refit._core: the C++ API as Python sees it. It checks and converts, nothing
// else; the package around it (python/refit) is what users import.
#include <nanobind/nanobind.h>

#include <exception>
#include <string>

#include "python/src/bindings.h"
#include "python/src/status.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        try {
          std::rethrow_exception(pointer);
        } catch (const refit::python::StatusError& error) {
          const auto message = error.status.message();
          const nb::object exception =
              nb::module_::import_("refit.errors")
                  .attr("from_status")(static_cast<int>(error.status.code()),
                                       nb::str(message.data(), message.size()));
          PyErr_SetObject(exception.type().ptr(), exception.ptr());
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
}
