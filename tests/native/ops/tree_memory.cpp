// Bytes that a context allocates for its memory: usage tree-memory MODEL N_SEQ N_RS_SEQ N_NODES (0: no trees).
#include "llama.h"
#include "llama-ext.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char ** argv) {
    if (argc != 5) {
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) { level >= GGML_LOG_LEVEL_WARN ? (void) fputs(text, stderr) : (void) 0; }, nullptr);

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());

    llama_context_params params = llama_context_default_params();
    params.n_ctx     = 256;
    params.n_seq_max = atoi(argv[2]);
    params.n_rs_seq  = atoi(argv[3]);

    llama_context * ctx = model ? llama_init_from_model(model, params) : nullptr;
    if (!ctx || (atoi(argv[4]) > 0 && !llama_tree_init(ctx, atoi(argv[4])))) {
        return 1;
    }

    size_t size = 0;
    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        size += mb.context;
    }
    printf("%zu\n", size);

    llama_free(ctx);
    llama_model_free(model);
}
