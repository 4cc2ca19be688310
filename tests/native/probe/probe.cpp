// Runs a target and a DFlash draft over given tokens and writes what each computed, as .npy files:
//   logits        {n_vocab, n_tokens}      target logits of every token
//   taps          {n_embd * n_taps, n}     inputs of the tapped layers, in the draft's order
//   tap_layers    {n_taps}                 which layers those are
//   block_ids     {n_block}                ids that the draft block was given
//   block_logits  {n_vocab, n_block}       draft logits of every block position
//   draft         {n_draft}                drafted tokens
// and, for tests/native/test_abi.py, abi.txt: "STRUCT SIZE" and "STRUCT.FIELD OFFSET" lines of the public structs.
//
// usage: llama-dflash-probe golden TARGET DRAFT N_MAX OUT_DIR ID [ID ...]
//        llama-dflash-probe abi OUT_DIR
// The last ID is the anchor of the block; the ids before it are the context.

#include "arg.h"
#include "common.h"
#include "ggml-backend.h"
#include "llama.h"
#include "llama-ext.h"
#include "speculative.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

template <typename T> static const char * npy_descr();
template <> const char * npy_descr<float>()   { return "<f4"; }
template <> const char * npy_descr<int32_t>() { return "<i4"; }

// rows x cols, row-major; cols == 0 writes a 1-D array
template <typename T>
static void write_npy(const std::string & path, const T * data, size_t rows, size_t cols) {
    const std::string shape = cols ? std::to_string(rows) + ", " + std::to_string(cols) : std::to_string(rows) + ",";
    std::string head = std::string("{'descr': '") + npy_descr<T>() + "', 'fortran_order': False, 'shape': (" + shape + "), }";
    while ((10 + head.size() + 1) % 64 != 0) {
        head += ' ';
    }
    head += '\n';

    FILE * f = fopen(path.c_str(), "wb");
    if (f == nullptr) {
        fprintf(stderr, "probe: cannot write %s\n", path.c_str());
        exit(1);
    }
    const uint16_t n_head = (uint16_t) head.size();
    fwrite("\x93NUMPY\x01\x00", 1, 8, f);
    fwrite(&n_head, 2, 1, f);
    fwrite(head.data(), 1, head.size(), f);
    fwrite(data, sizeof(T), rows * (cols ? cols : 1), f);
    fclose(f);
}

// ids of the last graph that looked tokens up
struct seen_ids {
    std::vector<int32_t> ids;
};

static bool on_eval(ggml_tensor * t, bool ask, void * user_data) {
    // the draft's graph gives its token input no name: the table that the rows come from tells
    const bool is_lookup = t->op == GGML_OP_GET_ROWS && strcmp(t->src[0]->name, "token_embd.weight") == 0;
    const ggml_tensor * ids = is_lookup ? t->src[1] : nullptr;
    if (ids == nullptr || ids->type != GGML_TYPE_I32) {
        return !ask;
    }
    if (!ask) {
        auto & seen = *(seen_ids *) user_data;
        seen.ids.resize(ggml_nelements(ids));
        ggml_backend_tensor_get(ids, seen.ids.data(), 0, ggml_nbytes(ids));
    }
    return true;
}

#define CHECK(cond, ...) do { if (!(cond)) { fprintf(stderr, "probe: " __VA_ARGS__); fputc('\n', stderr); exit(1); } } while (0)

#define SIZE(type)        fprintf(f, #type " %zu\n", sizeof(type))
#define FIELD(type, name) fprintf(f, #type "." #name " %zu\n", offsetof(type, name))

static void abi_model_params(FILE * f) {
    SIZE(llama_model_params);
    FIELD(llama_model_params, devices);
    FIELD(llama_model_params, tensor_buft_overrides);
    FIELD(llama_model_params, n_gpu_layers);
    FIELD(llama_model_params, split_mode);
    FIELD(llama_model_params, load_mode);
    FIELD(llama_model_params, lazy_mode);
    FIELD(llama_model_params, main_gpu);
    FIELD(llama_model_params, tensor_split);
    FIELD(llama_model_params, progress_callback);
    FIELD(llama_model_params, progress_callback_user_data);
    FIELD(llama_model_params, kv_overrides);
    FIELD(llama_model_params, vocab_only);
    FIELD(llama_model_params, check_tensors);
    FIELD(llama_model_params, use_extra_bufts);
    FIELD(llama_model_params, no_host);
    FIELD(llama_model_params, no_alloc);
    FIELD(llama_model_params, load_mtp);
}

static void abi_context_params(FILE * f) {
    SIZE(llama_context_params);
    FIELD(llama_context_params, n_ctx);
    FIELD(llama_context_params, n_batch);
    FIELD(llama_context_params, n_ubatch);
    FIELD(llama_context_params, n_seq_max);
    FIELD(llama_context_params, n_rs_seq);
    FIELD(llama_context_params, n_outputs_max);
    FIELD(llama_context_params, n_outputs_max_per_seq);
    FIELD(llama_context_params, n_threads);
    FIELD(llama_context_params, n_threads_batch);
    FIELD(llama_context_params, ctx_type);
    FIELD(llama_context_params, rope_scaling_type);
    FIELD(llama_context_params, pooling_type);
    FIELD(llama_context_params, attention_type);
    FIELD(llama_context_params, flash_attn_type);
    FIELD(llama_context_params, rope_freq_base);
    FIELD(llama_context_params, rope_freq_scale);
    FIELD(llama_context_params, yarn_ext_factor);
    FIELD(llama_context_params, yarn_attn_factor);
    FIELD(llama_context_params, yarn_beta_fast);
    FIELD(llama_context_params, yarn_beta_slow);
    FIELD(llama_context_params, yarn_orig_ctx);
    FIELD(llama_context_params, defrag_thold);
    FIELD(llama_context_params, cb_eval);
    FIELD(llama_context_params, cb_eval_user_data);
    FIELD(llama_context_params, type_k);
    FIELD(llama_context_params, type_v);
    FIELD(llama_context_params, abort_callback);
    FIELD(llama_context_params, abort_callback_data);
    FIELD(llama_context_params, embeddings);
    FIELD(llama_context_params, offload_kqv);
    FIELD(llama_context_params, no_perf);
    FIELD(llama_context_params, op_offload);
    FIELD(llama_context_params, swa_full);
    FIELD(llama_context_params, kv_unified);
    FIELD(llama_context_params, samplers);
    FIELD(llama_context_params, n_samplers);
    FIELD(llama_context_params, ctx_other);
}

static void abi_batch(FILE * f) {
    SIZE(llama_batch);
    FIELD(llama_batch, n_tokens);
    FIELD(llama_batch, token);
    FIELD(llama_batch, embd);
    FIELD(llama_batch, pos);
    FIELD(llama_batch, n_seq_id);
    FIELD(llama_batch, seq_id);
    FIELD(llama_batch, logits);
}

static void probe_abi(const std::string & out) {
    FILE * f = fopen((out + "/abi.txt").c_str(), "w");
    CHECK(f != nullptr, "cannot write %s/abi.txt", out.c_str());
    abi_model_params(f);
    abi_context_params(f);
    abi_batch(f);
    SIZE(llama_token_data);
    SIZE(llama_token_data_array);
    SIZE(llama_model_kv_override);
    SIZE(llama_model_tensor_override);
    SIZE(llama_model_imatrix_data);
    SIZE(llama_model_quantize_params);
    SIZE(llama_sampler_seq_config);
    SIZE(llama_sampler_chain_params);
    SIZE(llama_sampler_data);
    SIZE(llama_sampler_i);
    SIZE(llama_sampler);
    SIZE(llama_logit_bias);
    SIZE(llama_chat_message);
    SIZE(llama_embd);
    SIZE(llama_perf_context_data);
    SIZE(llama_perf_sampler_data);
    SIZE(llama_opt_params);
    fclose(f);
}

static void decode_context(llama_context * ctx_tgt, common_speculative * spec, const std::vector<llama_token> & ids) {
    common_batch batch(ctx_tgt);
    for (size_t i = 0; i < ids.size(); ++i) {
        batch.add(ids[i], (llama_pos) i, 0, true);
    }
    CHECK(llama_process(ctx_tgt, LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0, "the target did not decode");
    CHECK(common_speculative_process(spec, batch), "the draft did not take the features");
}

static void probe_golden(const char * path_tgt, const char * path_dft, int n_max, const std::string & out,
                         const std::vector<llama_token> & ids) {
    seen_ids seen;

    common_params params;
    params.model.path        = path_tgt;
    params.n_ctx             = 2048;
    params.n_batch           = 2048;
    params.n_ubatch          = 2048;
    params.fit_params        = false;
    params.warmup            = false;
    params.flash_attn_type   = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.cache_type_k      = GGML_TYPE_F32;
    params.cache_type_v      = GGML_TYPE_F32;
    params.n_outputs_max     = (int32_t) ids.size();
    params.n_outputs_max_per_seq = (int32_t) ids.size();
    params.cpuparams.n_threads   = 2;
    postprocess_cpu_params(params.cpuparams_batch,                   &params.cpuparams); // the command line's parser does it
    postprocess_cpu_params(params.speculative.draft.cpuparams,       &params.cpuparams);
    postprocess_cpu_params(params.speculative.draft.cpuparams_batch, &params.cpuparams_batch);
    params.speculative.types = { COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH };
    params.speculative.draft.mparams.path     = path_dft;
    params.speculative.draft.n_max            = n_max;
    params.speculative.draft.cache_type_k     = GGML_TYPE_F32;
    params.speculative.draft.cache_type_v     = GGML_TYPE_F32;
    params.speculative.draft.backend_sampling = false; // keeps the logits of the block on the host

    auto init = common_init_from_params(params);
    llama_model   * model_tgt = init->model();
    llama_context * ctx_tgt   = init->context();
    CHECK(ctx_tgt != nullptr, "cannot load the target %s", path_tgt);

    common_params params_dft = common_base_params_to_speculative(params);
    params_dft.cb_eval           = on_eval;
    params_dft.cb_eval_user_data = &seen;
    auto init_dft = common_speculative_init_from_params(params_dft, model_tgt, ctx_tgt);
    llama_context * ctx_dft = init_dft->context();
    CHECK(ctx_dft != nullptr, "cannot load the draft %s", path_dft);
    params.speculative.draft.ctx_tgt = ctx_tgt;
    params.speculative.draft.ctx_dft = ctx_dft;

    common_speculative_ptr spec(common_speculative_init(params.speculative, 1));
    CHECK(spec != nullptr, "no speculative implementation");

    const std::vector<llama_token> context(ids.begin(), ids.end() - 1);
    decode_context(ctx_tgt, spec.get(), context);

    const size_t n_tokens = context.size();
    const size_t n_vocab  = llama_vocab_n_tokens(llama_model_get_vocab(model_tgt));
    const size_t n_embd   = llama_model_n_embd(model_tgt);

    std::vector<float> logits;
    for (size_t i = 0; i < n_tokens; ++i) {
        const float * row = llama_get_logits_ith(ctx_tgt, (int32_t) i);
        CHECK(row != nullptr, "no logits for token %zu", i);
        logits.insert(logits.end(), row, row + n_vocab);
    }
    write_npy(out + "/logits.npy", logits.data(), n_tokens, n_vocab);

    const llama_model * model_dft = llama_get_model(ctx_dft);
    const int32_t * taps   = llama_model_target_layer_ids(model_dft);
    const size_t    n_taps = llama_model_target_layer_ids_n(model_dft);
    std::vector<float> features(n_tokens * n_taps * n_embd);
    for (size_t k = 0; k < n_taps; ++k) {
        const float * layer = llama_get_embeddings_layer_inp(ctx_tgt, taps[k]);
        CHECK(layer != nullptr, "input of layer %d was not captured", taps[k]);
        for (size_t i = 0; i < n_tokens; ++i) {
            memcpy(&features[(i * n_taps + k) * n_embd], layer + i * n_embd, n_embd * sizeof(float));
        }
    }
    write_npy(out + "/tap_layers.npy", taps, n_taps, 0);
    write_npy(out + "/taps.npy", features.data(), n_tokens, n_taps * n_embd);

    llama_tokens draft;
    common_speculative_begin(spec.get(), 0, context);
    common_speculative_draft_params & dparams = common_speculative_get_draft_params(spec.get(), 0);
    dparams.drafting = true;
    dparams.n_max    = n_max;
    dparams.pos0     = (llama_pos) n_tokens;
    dparams.id_last  = ids.back();
    dparams.prompt   = &context;
    dparams.result   = &draft;
    seen.ids.clear(); // only the draft block's own graph counts
    common_speculative_draft(spec.get());
    CHECK(!seen.ids.empty(), "the draft block looked no tokens up");

    write_npy(out + "/block_ids.npy", seen.ids.data(), seen.ids.size(), 0);
    std::vector<float> block_logits;
    for (size_t i = 0; i < seen.ids.size(); ++i) {
        const float * row = llama_get_logits_ith(ctx_dft, (int32_t) i);
        CHECK(row != nullptr, "no draft logits for position %zu", i);
        block_logits.insert(block_logits.end(), row, row + n_vocab);
    }
    write_npy(out + "/block_logits.npy", block_logits.data(), seen.ids.size(), n_vocab);
    write_npy(out + "/draft.npy", draft.data(), draft.size(), 0);
}

int main(int argc, char ** argv) {
    if (argc == 3 && strcmp(argv[1], "abi") == 0) {
        probe_abi(argv[2]);
        return 0;
    }
    CHECK(argc >= 8 && strcmp(argv[1], "golden") == 0, "usage: golden TARGET DRAFT N_MAX OUT_DIR ID ID [ID ...] | abi OUT_DIR");

    common_init();
    llama_backend_init();

    std::vector<llama_token> ids;
    for (int i = 6; i < argc; ++i) {
        ids.push_back(atoi(argv[i]));
    }
    probe_golden(argv[2], argv[3], atoi(argv[4]), argv[5], ids);

    llama_backend_free();
    return 0;
}
