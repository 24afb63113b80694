// What a job says that its plan does not, for the page.
#ifndef REFIT_REPORT_JOB_TEXT_H_
#define REFIT_REPORT_JOB_TEXT_H_

#include <string>

#include "compiler/job/job.h"

namespace refit::report {

struct JobText {
  std::string path;
  std::string model_path;  // "": the job has its parameters itself
  std::string source;      // "megatron: tensor_parallel 2, data_parallel 4"
  std::string destination;
};

JobText TextOfJob(const std::string& path, const Job& job);

}  // namespace refit::report

#endif  // REFIT_REPORT_JOB_TEXT_H_
