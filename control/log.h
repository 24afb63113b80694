// What the library says besides statuses and notices.
#ifndef REFIT_CONTROL_LOG_H_
#define REFIT_CONTROL_LOG_H_

#include <string>

#include "refit/log.h"

namespace refit {

// Gives `line`, without an end of line, to the sink that SetLogSink set.
void Log(LogLevel level, const std::string& line);

}  // namespace refit

#endif  // REFIT_CONTROL_LOG_H_
