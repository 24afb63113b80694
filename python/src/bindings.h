// What module.cc puts together: a part of the module for each subject.
#ifndef REFIT_PYTHON_SRC_BINDINGS_H_
#define REFIT_PYTHON_SRC_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace refit::python {

void BindPlan(nanobind::module_& module);      // compile, PlanFile
void BindExecutor(nanobind::module_& module);  // Executor and where ranks meet
void BindLog(nanobind::module_& module);       // for refit.logs

}  // namespace refit::python

#endif  // REFIT_PYTHON_SRC_BINDINGS_H_
