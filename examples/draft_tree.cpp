// Verify a draft tree in one pass and accept the path that the model itself would have taken.
// usage: draft-tree MODEL.gguf PROMPT
#include "llama.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

static llama_token best(llama_context * ctx, const llama_vocab * vocab, int32_t i) {
    const float * logits = llama_get_logits_ith(ctx, i);
    return std::max_element(logits, logits + llama_vocab_n_tokens(vocab)) - logits;
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf PROMPT\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context * ctx = model ? llama_init_from_model(model, llama_context_default_params()) : nullptr;
    if (!ctx || !llama_tree_init(ctx, 8)) {
        fprintf(stderr, "%s: no context for draft trees\n", argv[1]);
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);

    std::vector<llama_token> tokens(strlen(argv[2]) + 1);
    tokens.resize(std::max(0, llama_tokenize(vocab, argv[2], strlen(argv[2]), tokens.data(), tokens.size(), true, true)));
    if (tokens.empty() || llama_decode(ctx, llama_batch_get_one(tokens.data(), tokens.size())) != 0) {
        fprintf(stderr, "the prompt cannot be decoded\n");
        return 1;
    }

    // The root is the token that follows the prompt. Its children are guesses: here two poor ones, one of them with a child.
    struct node { llama_token token; int32_t parent; llama_pos depth; };
    const llama_token root = best(ctx, vocab, -1);
    const std::vector<node> tree = { { root, 0, 0 }, { root, 0, 1 }, { tokens[0], 0, 1 }, { tokens[0], 1, 2 } };

    llama_batch_ext * batch = llama_batch_ext_init(ctx);
    for (size_t i = 0; i < tree.size(); ++i) {
        const llama_pos pos = tokens.size() + tree[i].depth;
        llama_batch_ext_add_token(batch, 0, tree[i].token);
        llama_batch_ext_set_pos(batch, i, &pos);
        llama_batch_ext_set_parent(batch, i, tree[i].parent); // the root names itself
        llama_batch_ext_set_output_logits(batch, i, true);
    }
    const int32_t status = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    llama_batch_ext_free(batch);
    if (status != 0) {
        fprintf(stderr, "the tree cannot be decoded: %d\n", status);
        return 1;
    }

    // Walk: at each node the model names the next token; go to the child that guessed it, or stop.
    std::vector<int32_t> path = { 0 };
    llama_token next = best(ctx, vocab, 0);
    for (size_t i = 1; i < tree.size(); ++i) {
        if (tree[i].parent == path.back() && tree[i].token == next) {
            path.push_back(i);
            next = best(ctx, vocab, i);
        }
    }
    const bool ok = llama_tree_accept(ctx, 0, path.data(), path.size()); // the other nodes leave no trace
    printf("accepted %zu of %zu nodes, length %d, next token %d\n", path.size(), tree.size(),
            llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1, next);

    llama_free(ctx);
    llama_model_free(model);
    return ok ? 0 : 1;
}
