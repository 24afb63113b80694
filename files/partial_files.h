// PartialFiles: files that must not outlive the process half written.
#ifndef REFIT_FILES_PARTIAL_FILES_H_
#define REFIT_FILES_PARTIAL_FILES_H_

#include <mutex>
#include <set>
#include <string>

namespace refit {

// The temporary files of this process. Thread-safe.
class PartialFiles {
 public:
  static PartialFiles& OfThisProcess();

  // Call Add before the file is made, or hold the files meanwhile; Remove when
  // it is renamed or gone.
  void Add(const std::string& path);
  void Remove(const std::string& path);

  // While it is held no signal ends the process: for renames that belong
  // together. The holder may call Add and Remove.
  std::unique_lock<std::recursive_mutex> Hold();

  // Removes the files. The process has to end now: who adds another waits for
  // ever.
  void Unlink();

 private:
  std::recursive_mutex mutex_;
  std::set<std::string> paths_;
};

// From its construction on, SIGINT, SIGTERM and SIGHUP remove the process's
// partial files before they end it as they always do. Construct it in main,
// before any other thread: threads made later leave the signals to its own. A
// process that fork makes has no such thread, so signals just end it, and the
// files stay its parent's. Signals that the process ignores, as under nohup,
// stay ignored.
class SignalCleanup {
 public:
  SignalCleanup();
};

}  // namespace refit

#endif  // REFIT_FILES_PARTIAL_FILES_H_
