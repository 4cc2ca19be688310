// Runs ggml_gated_delta_net_tree or ggml_gated_delta_net on arrays from files, for tests/native/test_tree_op.py.
//
// usage: llama-dflash-ops BACKEND N_THREADS JOB_DIR [JOB_DIR ...]
//
// A JOB_DIR holds
//   job          "KEY VALUE" lines of integers:
//                  tree             1 runs the tree op, 0 the chain op
//                  S H_k H_v T      head size, heads of q and k, heads of v, tokens of each sequence
//                  n_seqs n_seqs_k  sequences; those of q and k
//                  kda permuted     gate of S values; q, k, v stored as {S, T, H, n_seqs}
//                  offset stride    where a sequence's state is in state, in floats: offset + seq * stride
//                  n_slots          of the tree op
//                  n_runs           0: only the result counts; else time_us is the mean of that many runs
//   q k v g beta state   raw float32 in ggml's layout; state is a whole cache
//   order                raw int32 {3, T, n_seqs}, tree op only
// and is given
//   out          raw float32 {S, H_v, T, n_seqs}
//   state_after  the bytes of state after the op
//   time_us      one number, with n_runs

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

[[noreturn]] static void fail(const std::string & what) {
    fprintf(stderr, "ops: %s\n", what.c_str());
    exit(1);
}

static std::vector<char> read_bytes(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        fail("cannot read " + path);
    }
    return { std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>() };
}

static void write_bytes(const std::string & path, const void * data, size_t size) {
    std::ofstream out(path, std::ios::binary);
    if (!out.write((const char *) data, size)) {
        fail("cannot write " + path);
    }
}

static void load(ggml_tensor * t, const std::string & path) {
    const std::vector<char> bytes = read_bytes(path);
    if (bytes.size() != ggml_nbytes(t)) {
        fail(path + " has " + std::to_string(bytes.size()) + " bytes, expected " + std::to_string(ggml_nbytes(t)));
    }
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

static void store(const ggml_tensor * t, size_t size, const std::string & path) {
    std::vector<char> bytes(size);
    ggml_backend_tensor_get(t, bytes.data(), 0, size);
    write_bytes(path, bytes.data(), size);
}

struct job {
    std::string dir;
    std::map<std::string, int64_t> values;

    explicit job(const std::string & dir) : dir(dir) {
        std::ifstream in(dir + "/job");
        std::string key;
        int64_t value;
        while (in >> key >> value) {
            values[key] = value;
        }
    }

    int64_t operator[](const std::string & key) const {
        const auto it = values.find(key);
        if (it == values.end()) {
            fail(dir + "/job lacks " + key);
        }
        return it->second;
    }

    std::string path(const std::string & name) const { return dir + "/" + name; }
};

static void run(ggml_backend_t backend, const job & job) {
    const int64_t S = job["S"];
    const int64_t T = job["T"];
    const int64_t H_v = job["H_v"];
    const int64_t n_seqs = job["n_seqs"];
    const bool permuted = job["permuted"];

    ggml_context_ptr ctx(ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*.no_alloc =*/ true }));

    std::map<std::string, ggml_tensor *> inputs;
    auto heads = [&](const char * name, int64_t H, int64_t n) {
        ggml_tensor * t = inputs[name] = permuted ? ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, S, T, H, n)
                                                  : ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, S, H, T, n);
        return permuted ? ggml_permute(ctx.get(), t, 0, 2, 1, 3) : t;
    };
    ggml_tensor * q = heads("q", job["H_k"], job["n_seqs_k"]);
    ggml_tensor * k = heads("k", job["H_k"], job["n_seqs_k"]);
    ggml_tensor * v = heads("v", H_v, n_seqs);

    ggml_tensor * g    = inputs["g"]    = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, job["kda"] ? S : 1, H_v, T, n_seqs);
    ggml_tensor * beta = inputs["beta"] = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 1, H_v, T, n_seqs);

    const int64_t n_cache = read_bytes(job.path("state")).size()/sizeof(float);
    if (job["offset"] + (n_seqs - 1)*job["stride"] + S*S*H_v > n_cache) {
        fail(job.dir + ": state is too small");
    }
    ggml_tensor * cache = inputs["state"] = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_cache);
    ggml_tensor * state = ggml_view_4d(ctx.get(), cache, S, S, H_v, n_seqs,
            S*sizeof(float), S*S*sizeof(float), job["stride"]*sizeof(float), job["offset"]*sizeof(float));

    ggml_tensor * out = nullptr;
    if (job["tree"]) {
        ggml_tensor * order = inputs["order"] = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_I32, 3, T, n_seqs);
        out = ggml_gated_delta_net_tree(ctx.get(), q, k, v, g, beta, state, order, (int32_t) job["n_slots"]);
    } else {
        out = ggml_gated_delta_net(ctx.get(), q, k, v, g, beta, state, /*K =*/ 1);
    }
    if (!ggml_backend_supports_op(backend, out)) {
        fail(std::string(ggml_backend_name(backend)) + " does not support " + ggml_op_name(out->op));
    }

    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);

    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    ggml_backend_buffer_clear(buffer.get(), 0xff); // NaN: a row that is not written shows
    for (const auto & [name, tensor] : inputs) {
        load(tensor, job.path(name));
    }

    auto compute = [&]() {
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            fail(job.dir + ": the graph failed");
        }
        ggml_backend_synchronize(backend);
    };
    compute();
    store(out, S*H_v*T*n_seqs*sizeof(float), job.path("out"));
    store(cache, ggml_nbytes(cache), job.path("state_after"));

    if (job["n_runs"] > 0) {
        const int64_t start = ggml_time_us();
        for (int64_t i = 0; i < job["n_runs"]; ++i) {
            compute();
        }
        const std::string mean = std::to_string((double) (ggml_time_us() - start)/job["n_runs"]);
        write_bytes(job.path("time_us"), mean.data(), mean.size());
    }
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        fail("usage: llama-dflash-ops BACKEND N_THREADS JOB_DIR [JOB_DIR ...]");
    }
    ggml_time_init();
    ggml_backend_load_all();

    ggml_backend_ptr backend(ggml_backend_init_by_name(argv[1], nullptr));
    if (!backend) {
        fail(std::string("no backend ") + argv[1]);
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(backend.get(), atoi(argv[2]));
    }

    for (int i = 3; i < argc; ++i) {
        run(backend.get(), job(argv[i]));
    }
    return 0;
}
