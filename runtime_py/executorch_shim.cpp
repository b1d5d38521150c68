// C ABI over ExecuTorch's C++ library: load a .pte with one method "forward" whose inputs are tensors of float32, float16
// or int8 and whose outputs are float32, and run it. No torch, no Python: a phone app links this file as it is.
//
//   g4_set_threads   once per process, before the first g4_open: XNNPACK takes its pool at load time
//   g4_open          maps the file; null on failure
//   g4_bound         upper bounds of an input's or output's sizes; a size that is fixed is its own bound
//   g4_type          ExecuTorch's number of an input's or output's type: 6 float32, 5 float16, 1 int8
//   g4_bind          gives output i its memory, as many floats as its bounds multiply to; once, before g4_run
//   g4_run           reads the inputs where they lie and writes the bound outputs
//   g4_sizes         sizes that output i had in the last run
//   g4_close         the bound memory stays the caller's
//   g4_pack          writes a packed_cache and checks that it loads; for a process of its own, see there
//
// Functions that can fail take a buffer for one line of text, always terminated. A graph may be used from any thread,
// by one at a time. Sizes are as many integers as the rank, outermost first; tensors are contiguous.
//
// packed_cache: path of the file with XNNPACK's packed weights, shorter than 256 bytes. Finished: it is mapped, which
// takes no time and no anonymous memory. Absent or empty: weights are packed and written to it. Null: they are packed
// in anonymous memory. The caller chooses a name that changes with the .pte, the processor and ExecuTorch's version,
// lets one process at a time be inside g4_open with it, and gives no file of which it does not know that packing
// finished.
//
// Build: C++17, include and library paths of the executorch package; the command is in graph_executorch.py.

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace executorch::extension::threadpool {  // the package ships the symbols, not the header
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace {
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::PalImpl;
using executorch::runtime::Program;

constexpr char kMethod[] = "forward";

thread_local char last_error[256];  // the newest error line of this thread's log

// ExecuTorch logs to stderr, which is the user's. Errors are kept for our own messages, the rest is dropped.
void keep_errors(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* text, size_t) {
  if (level == kError || level == kFatal) std::snprintf(last_error, sizeof last_error, "%s", text);
}

const bool registered = executorch::runtime::register_pal(PalImpl::create(keep_errors, __FILE__));

// cpuinfo writes what it misses in a container straight to stderr, once, when the pool is made.
executorch::extension::threadpool::ThreadPool* quiet_threadpool() {
  const int saved = dup(STDERR_FILENO), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (saved >= 0 && null >= 0) dup2(null, STDERR_FILENO);
  auto* pool = executorch::extension::threadpool::get_threadpool();
  if (saved >= 0 && null >= 0) dup2(saved, STDERR_FILENO);
  if (saved >= 0) close(saved);
  if (null >= 0) close(null);
  return pool;
}

// XNNPACK keeps its cache file locked for as long as it is loaded, which would shut other processes out of a file that
// nobody writes any more. The lock belongs to the open file, so it can be dropped from here.
void unlock_file(const char* path) {
  char wanted[PATH_MAX];
  if (!realpath(path, wanted)) return;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const auto target = std::filesystem::read_symlink(entry.path(), ignored);
    if (!ignored && target == wanted) flock(std::atoi(entry.path().filename().c_str()), LOCK_UN);
  }
}

int explain(Error code, char* error, size_t error_size) {
  const char* name = executorch::runtime::to_string(code);
  std::snprintf(error, error_size, "%s%s%s", name, *last_error ? ": " : "", last_error);
  return -1;
}
}  // namespace

struct g4_graph {
  std::unique_ptr<Module> module;
  executorch::runtime::BackendOptions<2> options;
  executorch::runtime::LoadBackendOptionsMap options_map;
  std::vector<std::vector<SizesType>> bounds[2];  // of inputs, of outputs
  std::vector<ScalarType> types[2];
  std::vector<float*> bound;                      // memory of the outputs
  std::vector<EValue> outputs;                    // of the last run
};

static Error read_bounds(g4_graph* graph) {
  const auto meta = graph->module->method_meta(kMethod);
  if (!meta.ok()) return meta.error();
  for (int output = 0; output < 2; output++) {
    const size_t count = output ? meta->num_outputs() : meta->num_inputs();
    for (size_t i = 0; i < count; i++) {
      const auto info = output ? meta->output_tensor_meta(i) : meta->input_tensor_meta(i);
      if (!info.ok()) return info.error();
      const ScalarType type = info->scalar_type();
      const bool narrow = type == ScalarType::Half || type == ScalarType::Char;
      if (type != ScalarType::Float && (output || !narrow)) return Error::InvalidType;
      graph->types[output].push_back(type);
      graph->bounds[output].emplace_back(info->sizes().begin(), info->sizes().end());
    }
  }
  graph->bound.resize(graph->bounds[1].size());
  return Error::Ok;
}

static Error load(g4_graph* graph, const char* path, const char* packed_cache) {
  if (packed_cache && std::strlen(packed_cache) >= executorch::runtime::kMaxOptionValueLength) {
    return Error::InvalidArgument;  // it would be cut off
  }
  graph->module = std::make_unique<Module>(path, Module::LoadMode::Mmap);
  Error error = graph->options.set_option("weight_cache_enabled", packed_cache != nullptr);
  if (error == Error::Ok && packed_cache) error = graph->options.set_option("packed_cache_path", packed_cache);
  if (error == Error::Ok) error = graph->options_map.set_options("XnnpackBackend", graph->options.view());
  if (error == Error::Ok) error = graph->module->load(graph->options_map, Program::Verification::InternalConsistency);
  if (error == Error::Ok) error = graph->module->load_method(kMethod, nullptr, nullptr, &graph->options_map);
  if (packed_cache) unlock_file(packed_cache);
  return error == Error::Ok ? read_bounds(graph) : error;
}

extern "C" {

// -> 0, or -1 if the pool cannot be set
int g4_set_threads(int threads) {
  executorch::runtime::runtime_init();
  auto* pool = quiet_threadpool();
  return registered && pool && pool->_unsafe_reset_threadpool(static_cast<uint32_t>(threads)) ? 0 : -1;
}

g4_graph* g4_open(const char* path, const char* packed_cache, char* error, size_t error_size) {
  *last_error = '\0';
  auto graph = std::make_unique<g4_graph>();
  const Error code = load(graph.get(), path, packed_cache);
  if (code == Error::Ok) return graph.release();
  explain(code, error, error_size);
  return nullptr;
}

// output: 0 for inputs, 1 for outputs -> rank, with the bounds in sizes[0..capacity); -1 where there is no tensor i
int g4_bound(const g4_graph* graph, int output, int i, int* sizes, int capacity) {
  const auto& all = graph->bounds[output];
  if (i < 0 || i >= static_cast<int>(all.size())) return -1;
  std::copy_n(all[i].begin(), std::min<size_t>(capacity, all[i].size()), sizes);
  return static_cast<int>(all[i].size());
}

// -> the type's number; -1 where there is no tensor i
int g4_type(const g4_graph* graph, int output, int i) {
  const auto& all = graph->types[output];
  return i < 0 || i >= static_cast<int>(all.size()) ? -1 : static_cast<int>(all[i]);
}

// -> 0, or -1 with a reason
int g4_bind(g4_graph* graph, int i, float* data, char* error, size_t error_size) {
  *last_error = '\0';
  const auto& sizes = graph->bounds[1].at(i);
  const Error code = graph->module->set_output(kMethod, EValue(from_blob(data, sizes)), i);
  graph->bound[i] = data;
  return code == Error::Ok ? 0 : explain(code, error, error_size);
}

// data[i], ranks[i]: pointer and rank of input i; sizes: the sizes of all inputs in a row -> 0, or -1 with a reason.
// Ranks and bounds are checked; that sizes belong together (the same rows everywhere) is the caller's to know.
int g4_run(g4_graph* graph, void* const* data, const int* ranks, const int* sizes, char* error, size_t error_size) {
  *last_error = '\0';
  std::vector<TensorPtr> tensors;
  std::vector<EValue> values;
  for (const auto& bounds : graph->bounds[0]) {
    const size_t i = tensors.size(), rank = bounds.size();
    if (static_cast<size_t>(ranks[i]) != rank) return explain(Error::InvalidArgument, error, error_size);
    for (size_t k = 0; k < rank; k++) {
      if (sizes[k] < 1 || sizes[k] > bounds[k]) return explain(Error::InvalidArgument, error, error_size);
    }
    tensors.push_back(from_blob(data[i], std::vector<SizesType>(sizes, sizes + rank), graph->types[0][i]));
    values.emplace_back(tensors.back());
    sizes += rank;
  }
  auto result = graph->module->execute(kMethod, values);
  if (!result.ok()) return explain(result.error(), error, error_size);
  graph->outputs = std::move(*result);
  for (size_t i = 0; i < graph->outputs.size(); i++) {
    if (graph->outputs[i].toTensor().const_data_ptr<float>() != graph->bound[i]) {
      return explain(Error::InvalidState, error, error_size);  // not bound, or the method keeps this output to itself
    }
  }
  return 0;
}

// -> rank
int g4_sizes(const g4_graph* graph, int i, int* sizes, int capacity) {
  const auto tensor = graph->outputs.at(i).toTensor();
  std::copy_n(tensor.sizes().begin(), std::min<size_t>(capacity, tensor.dim()), sizes);
  return static_cast<int>(tensor.dim());
}

void g4_close(g4_graph* graph) { delete graph; }

// -> 0 if packed_cache is finished. XNNPACK writes it through a mapping, so a full disk ends the process with SIGBUS:
// let a process do this that may end.
int g4_pack(const char* path, const char* packed_cache) {
  char error[256];
  std::error_code failed;
  std::filesystem::file_time_type mark;
  for (int pass = 0; pass < 2; pass++) {
    g4_graph* graph = g4_open(path, packed_cache, error, sizeof error);
    if (!graph) return 1;
    g4_close(graph);
    if (pass == 0) {  // the second pass only maps a finished file, which keeps this time, and writes any other again
      mark = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
      std::filesystem::last_write_time(packed_cache, mark, failed);
      mark = std::filesystem::last_write_time(packed_cache, failed);
    }
  }
  return !failed && std::filesystem::last_write_time(packed_cache, failed) == mark && !failed ? 0 : 1;
}
}
