/* The C interface of llama-speculative-dflash.h, used from C: a host of its own against plain decoding.
 *
 * usage: c-api TARGET DRAFT PROMPT
 *        c-api abi
 *
 * Everything is compared token by token, which needs arithmetic that does not depend on the batch. */

#include "llama-speculative-dflash.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_CTX     512
#define N_PREDICT 96
#define N_PROMPT  256

static int n_failed = 0;

static void check(bool ok, const char * name, const char * what) {
    if (!ok) {
        printf("FAILED %s: %s (%s)\n", name, what, llama_speculative_dflash_last_error());
        n_failed++;
    }
}

static struct llama_model * model_tgt;
static struct llama_model * model_dft;
static const char         * path_dft;
static llama_token          prompt[N_PROMPT];
static int32_t              n_prompt;

static bool is_recurrent(void) {
    return llama_model_is_hybrid(model_tgt) || llama_model_is_recurrent(model_tgt);
}

static struct llama_context * new_context(int32_t n_ubatch) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx           = N_CTX;
    params.n_batch         = N_CTX;
    params.n_ubatch        = n_ubatch;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    return llama_init_from_model(model_tgt, params);
}

static struct llama_speculative_dflash_params new_params(int32_t budget) {
    struct llama_speculative_dflash_params params;
    llama_speculative_dflash_default_params(&params, sizeof(params));
    params.path_draft = path_dft;
    params.budget     = budget;
    params.verbosity  = 1;
    return params;
}

static struct llama_sampler * new_sampler(float temp) {
    struct llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (temp > 0.0f) {
        llama_sampler_chain_add(chain, llama_sampler_init_temp(temp));
        llama_sampler_chain_add(chain, llama_sampler_init_dist(7));
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    }
    return chain;
}

/* decode the prompt, and sample behind it */
static llama_token start(struct llama_context * ctx, struct llama_speculative_dflash * spec, struct llama_sampler * smpl) {
    if (llama_decode(ctx, llama_batch_get_one(prompt, n_prompt)) != 0) {
        abort();
    }
    if (spec) {
        check(llama_speculative_dflash_begin(spec, 0, NULL, 0), "start", "begin");
        check(llama_speculative_dflash_process(spec, 0, prompt, n_prompt, 0), "start", "process");
    }
    return llama_sampler_sample(smpl, ctx, -1);
}

static void plain(float temp, llama_token * out, int32_t n) {
    struct llama_context * ctx  = new_context(N_CTX);
    struct llama_sampler * smpl = new_sampler(temp);

    out[0] = start(ctx, NULL, smpl);
    for (int32_t i = 1; i < n; ++i) {
        if (llama_decode(ctx, llama_batch_get_one(&out[i - 1], 1)) != 0) {
            abort();
        }
        out[i] = llama_sampler_sample(smpl, ctx, -1);
    }

    llama_sampler_free(smpl);
    llama_free(ctx);
}

/* what the callbacks need */
struct host {
    struct llama_sampler * smpl;
    int32_t                n_left;    /* tokens that the consumer still wants */
    int32_t                n_sampled;
    llama_token            id_last;   /* of the round */
    bool                   ok;
};

static llama_token sample(const float * logits, int32_t n_vocab, const llama_token * path, int32_t n_path, void * user_data) {
    struct host * host = user_data;
    host->ok = host->ok && n_path >= 1 && path[0] == host->id_last;
    host->n_sampled++;

    llama_token_data * data = malloc(n_vocab * sizeof(llama_token_data));
    for (int32_t i = 0; i < n_vocab; ++i) {
        data[i].id    = i;
        data[i].logit = logits[i];
        data[i].p     = 0.0f;
    }
    llama_token_data_array candidates = { data, n_vocab, -1, false };
    llama_sampler_apply(host->smpl, &candidates);
    const llama_token token = candidates.data[candidates.selected].id;
    llama_sampler_accept(host->smpl, token);
    free(data);
    return token;
}

static llama_token sample_nothing(const float * logits, int32_t n_vocab, const llama_token * path, int32_t n_path, void * user_data) {
    (void) logits; (void) n_vocab; (void) path; (void) n_path; (void) user_data;
    return -1;
}

static bool consume(llama_token token, void * user_data) {
    struct host * host = user_data;
    (void) token;
    return --host->n_left > 0;
}

enum way { WAY_SAMPLER, WAY_CALLBACK, WAY_STEPS };

/* generate until out holds n tokens; out[0 .. n_have - 1] are there */
static void go_on(
        struct llama_context * ctx, struct llama_speculative_dflash * spec, struct llama_sampler * smpl, enum way way,
        llama_token * out, int32_t n_have, int32_t n) {
    while (n_have < n) {
        struct host host = { smpl, n - n_have, 0, out[n_have - 1], true };
        int32_t n_new = 0;
        switch (way) {
            case WAY_SAMPLER:
                n_new = llama_speculative_dflash_round(spec, 0, host.id_last, n - n_have, smpl, NULL, NULL, NULL, out + n_have, n - n_have);
                break;
            case WAY_CALLBACK:
                n_new = llama_speculative_dflash_round(spec, 0, host.id_last, -1, NULL, sample, consume, &host, out + n_have, n - n_have);
                check(host.ok && host.n_sampled == n_new, "callback", "the path, or the number of calls");
                break;
            case WAY_STEPS: {
                const int32_t n_rows = llama_speculative_dflash_round_begin(spec, 0, host.id_last, n - n_have, NULL, 0);
                check(n_rows >= 1 && n_rows <= llama_speculative_dflash_n_rows(spec), "steps", "rows");
                check(llama_speculative_dflash_round_tokens(spec)[0] == host.id_last && llama_speculative_dflash_round_parents(spec)[0] == 0, "steps", "root");
                while (true) {
                    const llama_token token = llama_sampler_sample(smpl, ctx, llama_speculative_dflash_round_row(spec));
                    out[n_have + n_new++] = token;
                    if (n_have + n_new == n || llama_speculative_dflash_round_take(spec, token) <= 0) {
                        break;
                    }
                }
                check(llama_speculative_dflash_round_end(spec) == n_new, "steps", "the length of the path");
                check(llama_speculative_dflash_round_row(spec) == -1 && llama_speculative_dflash_round_tokens(spec) == NULL, "steps", "a round after its end");
                break;
            }
        }
        if (n_new <= 0) {
            check(false, "round", "no tokens");
            return;
        }
        n_have += n_new;
    }
}

static void test_text(void) {
    static const int32_t budgets[] = { 0, 1, 15, 31 };
    for (int it = 0; it < 2; ++it) {
        const float temp = it == 0 ? 0.0f : 0.8f;
        llama_token want[N_PREDICT];
        plain(temp, want, N_PREDICT);

        for (size_t ib = 0; ib < sizeof(budgets)/sizeof(budgets[0]); ++ib) {
            int64_t n_rounds[3] = { 0, 0, 0 };
            for (int way = WAY_SAMPLER; way <= WAY_STEPS; ++way) {
                char name[64];
                snprintf(name, sizeof(name), "text: budget %d, temperature %.1f, way %d", budgets[ib], temp, way);

                struct llama_speculative_dflash_params params = new_params(budgets[ib]);
                struct llama_context            * ctx  = new_context(N_CTX);
                struct llama_speculative_dflash * spec = llama_speculative_dflash_open(model_tgt, ctx, &params);
                struct llama_sampler            * smpl = new_sampler(temp);
                check(spec != NULL, name, "open");
                if (!spec) {
                    continue;
                }
                check(strcmp(llama_speculative_dflash_mode(spec), budgets[ib] > 0 ? "tree" : "chain") == 0, name, llama_speculative_dflash_mode_text(spec));

                llama_token out[N_PREDICT] = { 0 };
                out[0] = start(ctx, spec, smpl);
                go_on(ctx, spec, smpl, (enum way) way, out, 1, N_PREDICT);
                check(memcmp(out, want, sizeof(out)) == 0, name, "the text differs");

                struct llama_speculative_dflash_stats stats = { sizeof(stats), 0, 0, 0, 0 };
                int64_t accepted[64] = { 0 }, sum = 0;
                check(llama_speculative_dflash_get_stats(spec, -1, &stats), name, "stats");
                const int32_t n_max = llama_speculative_dflash_get_accepted(spec, 0, accepted, 64);
                check(n_max == llama_speculative_dflash_n_max(spec), name, "depths");
                for (int32_t i = 0; i < n_max; ++i) {
                    check(i == 0 || accepted[i] <= accepted[i - 1], name, "accepted per depth");
                    sum += accepted[i];
                }
                check(stats.n_rounds + stats.n_accepted == N_PREDICT - 1 && sum == stats.n_accepted, name, "counts");
                check(stats.n_rounds < N_PREDICT - 1 && stats.n_draft_rounds <= stats.n_rounds && stats.n_nodes >= stats.n_accepted, name, "no draft was accepted");
                n_rounds[way] = stats.n_rounds;
                llama_speculative_dflash_reset_stats(spec);
                check(llama_speculative_dflash_get_stats(spec, 0, &stats) && stats.n_rounds == 0, name, "reset");

                llama_sampler_free(smpl);
                llama_speculative_dflash_free(spec);
                llama_free(ctx);
            }
            printf("rounds %d %.1f %d\n", budgets[ib], temp, (int) n_rounds[WAY_SAMPLER]);
            /* the callback does not know how many tokens are left, so its last drafts are deeper */
            check(n_rounds[WAY_SAMPLER] == n_rounds[WAY_STEPS], "text", "the rounds differ");
        }
    }
}

/* a consumer that stops anywhere and goes on later; a handle that is opened again */
static void test_stops(void) {
    llama_token want[N_PREDICT];
    plain(0.0f, want, N_PREDICT);

    struct llama_speculative_dflash_params params = new_params(15);
    struct llama_context            * ctx  = new_context(N_CTX);
    struct llama_speculative_dflash * spec = llama_speculative_dflash_open(model_tgt, ctx, &params);
    struct llama_sampler            * smpl = new_sampler(0.0f);

    llama_token out[N_PREDICT] = { 0 };
    out[0] = start(ctx, spec, smpl);

    int32_t n = 1;
    for (int32_t step = 1; n < N_PREDICT; step = step % 7 + 1) {
        struct host host = { smpl, step, 0, out[n - 1], true };
        llama_token some[64];
        const int32_t n_new = llama_speculative_dflash_round(spec, 0, out[n - 1], -1, smpl, NULL, consume, &host, some, 64);
        check(n_new >= 1 && n_new <= step, "stops", "the consumer was not asked");
        for (int32_t i = 0; i < n_new && n < N_PREDICT; ++i) {
            out[n++] = some[i];
        }
        check(llama_memory_seq_pos_max(llama_get_memory(ctx), 0) >= n_prompt + n - 2, "stops", "position");
        if (step == 4) {
            llama_speculative_dflash_free(spec);
            spec = llama_speculative_dflash_open(model_tgt, ctx, &params);
            check(spec != NULL, "stops", "opened again");
        }
    }
    check(memcmp(out, want, sizeof(out)) == 0, "stops", "the text differs");

    /* a callback that stops at once leaves id_last in the sequence and gives no token */
    const llama_pos pos = llama_memory_seq_pos_max(llama_get_memory(ctx), 0);
    llama_token none[8];
    check(llama_speculative_dflash_round(spec, 0, out[N_PREDICT - 1], -1, NULL, sample_nothing, NULL, NULL, none, 8) == 0, "stops", "a token");
    check(llama_memory_seq_pos_max(llama_get_memory(ctx), 0) == pos + 1, "stops", "position without a token");

    /* freed in the middle of a round: the context goes on */
    check(llama_speculative_dflash_round_begin(spec, 0, prompt[0], -1, NULL, 0) > 1, "stops", "begin");
    llama_speculative_dflash_free(spec);
    check(llama_memory_seq_pos_max(llama_get_memory(ctx), 0) == pos + 1, "stops", "position after free");
    check(llama_decode(ctx, llama_batch_get_one(prompt, 1)) == 0, "stops", "a decode after free");

    llama_sampler_free(smpl);
    llama_free(ctx);
}

/* saved and restored, whole and as a checkpoint */
static void test_state(void) {
    for (int partial = 0; partial < 2; ++partial) {
        const char * name = partial ? "state: partial" : "state: whole";
        const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;

        struct llama_speculative_dflash_params params = new_params(15);
        struct llama_context            * ctx  = new_context(N_CTX);
        struct llama_speculative_dflash * spec = llama_speculative_dflash_open(model_tgt, ctx, &params);
        struct llama_sampler            * smpl = new_sampler(0.0f);

        llama_token out[N_PREDICT] = { 0 }, again[N_PREDICT] = { 0 };
        out[0] = start(ctx, spec, smpl);

        const size_t n_tgt = llama_state_seq_get_size_ext(ctx, 0, flags);
        const size_t n_dft = llama_speculative_dflash_state_size(spec, 0, flags);
        uint8_t * tgt = malloc(n_tgt);
        uint8_t * dft = malloc(n_dft);
        check(llama_state_seq_get_data_ext(ctx, tgt, n_tgt, 0, flags) == n_tgt, name, "the target's state");
        check(n_dft > 0 && llama_speculative_dflash_state_get(spec, 0, dft, n_dft, flags) == n_dft, name, "get");
        check(llama_speculative_dflash_state_get(spec, 0, dft, n_dft - 1, flags) == 0, name, "get with too little room");

        struct llama_speculative_dflash_stats first = { sizeof(first), 0, 0, 0, 0 }, second = first;
        go_on(ctx, spec, smpl, WAY_SAMPLER, out, 1, N_PREDICT);
        llama_speculative_dflash_get_stats(spec, 0, &first);
        llama_speculative_dflash_reset_stats(spec);

        check(llama_state_seq_set_data_ext(ctx, tgt, n_tgt, 0, flags) == n_tgt, name, "the target's state back");
        check(llama_memory_seq_rm(llama_get_memory(ctx), 0, n_prompt, -1), name, "what is behind the target's state");
        check(llama_speculative_dflash_state_set(spec, 0, dft, n_dft, flags), name, "set");
        again[0] = out[0];
        go_on(ctx, spec, smpl, WAY_SAMPLER, again, 1, N_PREDICT);
        llama_speculative_dflash_get_stats(spec, 0, &second);
        check(memcmp(out, again, sizeof(out)) == 0, name, "the text differs");
        check(first.n_rounds == second.n_rounds && first.n_accepted == second.n_accepted, name, "the draft's state differs");

        /* damaged states are refused, and the draft then starts anew */
        dft[0] ^= 1;
        check(!llama_speculative_dflash_state_set(spec, 0, dft, n_dft, flags), name, "a damaged state");
        dft[0] ^= 1;
        check(!llama_speculative_dflash_state_set(spec, 0, dft, n_dft - 1, flags), name, "a short state");
        check(llama_speculative_dflash_round(spec, 0, out[N_PREDICT - 1], 8, smpl, NULL, NULL, NULL, again, 8) > 0, name, "a round without the draft's state");
        if (partial) {
            check(!llama_speculative_dflash_state_set(spec, 0, dft, n_dft, flags), name, "a checkpoint of what is gone");
        }

        free(tgt);
        free(dft);
        llama_sampler_free(smpl);
        llama_speculative_dflash_free(spec);
        llama_free(ctx);
    }
}

/* drafts of the caller's, without a draft model */
static void test_given(void) {
    llama_token want[N_PREDICT];
    plain(0.0f, want, N_PREDICT);

    struct llama_speculative_dflash_params params = new_params(0);
    params.path_draft = NULL;
    params.n_max      = 7;
    struct llama_context            * ctx  = new_context(N_CTX);
    struct llama_speculative_dflash * spec = llama_speculative_dflash_open(model_tgt, ctx, &params);
    struct llama_sampler            * smpl = new_sampler(0.0f);
    check(spec && strcmp(llama_speculative_dflash_mode(spec), "chain") == 0, "given", "mode");

    llama_token out[N_PREDICT] = { 0 };
    out[0] = start(ctx, spec, smpl);
    for (int32_t n = 1; n < N_PREDICT; ) {
        /* right for three tokens, then wrong */
        llama_token draft[8];
        for (int32_t i = 0; i < 8; ++i) {
            draft[i] = i < 3 && n + i < N_PREDICT ? want[n + i] : 0;
        }
        check(llama_speculative_dflash_round_begin(spec, 0, out[n - 1], N_PREDICT - n, draft, 8) >= 1, "given", "begin");
        llama_token token;
        do {
            token = out[n++] = llama_sampler_sample(smpl, ctx, llama_speculative_dflash_round_row(spec));
        } while (n < N_PREDICT && llama_speculative_dflash_round_take(spec, token) > 0);
        check(llama_speculative_dflash_round_end(spec) > 0, "given", "end");
    }
    check(memcmp(out, want, sizeof(out)) == 0, "given", "the text differs");
    struct llama_speculative_dflash_stats stats = { sizeof(stats), 0, 0, 0, 0 };
    llama_speculative_dflash_get_stats(spec, 0, &stats);
    check(stats.n_rounds <= N_PREDICT/4 + 1, "given", "the drafts were not accepted");

    llama_sampler_free(smpl);
    llama_speculative_dflash_free(spec);
    llama_free(ctx);
}

static void refused(struct llama_context * ctx, const struct llama_speculative_dflash_params * params, const char * words) {
    struct llama_speculative_dflash * spec = llama_speculative_dflash_open(model_tgt, ctx, params);
    check(spec == NULL, "refusals", words);
    check(strstr(llama_speculative_dflash_last_error(), words) != NULL, "refusals", words);
    llama_speculative_dflash_free(spec);
}

static void test_refusals(const char * path_tgt) {
    struct llama_context * ctx = new_context(32);
    struct llama_speculative_dflash_params p;

    refused(ctx, NULL, "params is NULL");
    p = new_params(15); p.size        = 8;         refused(ctx, &p, "params.size is 8");
    p = new_params(15); p.model_draft = model_dft; refused(ctx, &p, "both set");
    p = new_params(63);                            refused(ctx, &p, "n_nodes_max = 64, expected 1 to 32");
    p = new_params(15); p.n_max       = 16;        refused(ctx, &p, "expected at most 15");
    p = new_params(15); p.path_draft  = path_tgt;  refused(ctx, &p, "is not a DFlash, DFlash2 or DSpark draft");
    p = new_params(15); p.path_draft  = "/no/such/file"; refused(ctx, &p, "/no/such/file is not");
    p = new_params(15); p.path_draft  = NULL; p.model_draft = model_tgt; refused(ctx, &p, "expected 'dflash'");
    p = new_params(15); p.type        = "draft-mtp"; refused(ctx, &p, "type is 'draft-mtp'");
    p = new_params(15); p.n_seq       = 2;         refused(ctx, &p, "n_seq is 2");
    p = new_params(15); p.top_k       = 0;         refused(ctx, &p, "top_k is 0");
    p = new_params(15); p.p_min       = 2.0f;      refused(ctx, &p, "p_min is 2");
    p = new_params(15); p.rollback    = 9;         refused(ctx, &p, "rollback is 9");
    p = new_params(15); p.type_k      = 99999;     refused(ctx, &p, "type_k or type_v");
    p = new_params(15); p.path_draft  = NULL;      refused(ctx, &p, "n_max is 0 without a draft model");
    p = new_params(15); p.rollback    = LLAMA_SPECULATIVE_DFLASH_ROLLBACK_SNAPSHOT; refused(ctx, &p, "trees need");
    if (is_recurrent()) {
        p = new_params(0); p.rollback = LLAMA_SPECULATIVE_DFLASH_ROLLBACK_SNAPSHOT; refused(ctx, &p, "n_rs_seq = 15, it has 0");
    }

    /* a caller that knows more fields: they may be there, and must be 0 */
    struct { struct llama_speculative_dflash_params p; int32_t more[2]; } large;
    memset(&large, 0, sizeof(large));
    large.p = new_params(15);
    large.p.size = sizeof(large);
    large.more[1] = 1;
    refused(ctx, &large.p, "a field that this version does not know");
    large.more[1] = 0;
    struct llama_speculative_dflash * spec = llama_speculative_dflash_open(model_tgt, ctx, &large.p);
    check(spec != NULL, "refusals", "fields of 0");

    llama_token out[4];
    check(llama_speculative_dflash_round(spec, 0, -1, -1, NULL, sample_nothing, NULL, NULL, out, 4) == -1, "refusals", "a token of -1");
    check(llama_speculative_dflash_round(spec, 1, prompt[0], -1, NULL, sample_nothing, NULL, NULL, out, 4) == -1, "refusals", "a sequence too many");
    check(llama_speculative_dflash_round(spec, 0, prompt[0], -1, NULL, NULL, NULL, NULL, out, 4) == -1, "refusals", "no sampler");
    check(llama_speculative_dflash_round_end(spec) == -1, "refusals", "no round");
    check(!llama_speculative_dflash_process(spec, 0, prompt, 2, 0), "refusals", "tokens that were not decoded");
    check(llama_speculative_dflash_round_begin(spec, 0, prompt[0], -1, NULL, 0) > 0, "refusals", "a round on an empty context");
    check(llama_speculative_dflash_round_begin(spec, 0, prompt[0], -1, NULL, 0) == -1, "refusals", "a round in a round");
    check(llama_speculative_dflash_state_size(spec, 0, 0) == 0, "refusals", "a state in a round");
    llama_speculative_dflash_free(spec);

    /* a larger one on the same context */
    p = new_params(31);
    refused(ctx, &p, "opened before for at most 16 rows, expected 32");

    llama_free(ctx);

    /* the draft as a model of the caller's */
    ctx = new_context(N_CTX);
    p = new_params(15);
    p.path_draft  = NULL;
    p.model_draft = model_dft;
    spec = llama_speculative_dflash_open(model_tgt, ctx, &p);
    check(spec != NULL && strcmp(llama_speculative_dflash_mode(spec), "tree") == 0, "refusals", "a draft model of the caller's");
    llama_speculative_dflash_free(spec);
    llama_free(ctx);
}

static void on_log(enum ggml_log_level level, const char * text, void * user_data) {
    (void) level; (void) text;
    ++*(int *) user_data;
}

/* sizes and offsets, for the mirror in llama_dflash/speculative.py */
static void print_abi(void) {
#define FIELD(type, name) printf("%s.%s %zu %zu\n", #type, #name, offsetof(struct type, name), sizeof(((struct type *) 0)->name))
#define PARAM(name) FIELD(llama_speculative_dflash_params, name)
#define STAT(name)  FIELD(llama_speculative_dflash_stats,  name)
    printf("llama_speculative_dflash_params 0 %zu\n", sizeof(struct llama_speculative_dflash_params));
    PARAM(size);
    PARAM(path_draft);
    PARAM(model_draft);
    PARAM(type);
    PARAM(n_seq);
    PARAM(n_max);
    PARAM(budget);
    PARAM(top_k);
    PARAM(spine);
    PARAM(rollback);
    PARAM(type_k);
    PARAM(type_v);
    PARAM(flash_attn);
    PARAM(n_threads);
    PARAM(n_threads_batch);
    PARAM(n_gpu_layers);
    PARAM(verbosity);
    PARAM(p_min);
    printf("llama_speculative_dflash_stats 0 %zu\n", sizeof(struct llama_speculative_dflash_stats));
    STAT(size);
    STAT(n_rounds);
    STAT(n_draft_rounds);
    STAT(n_nodes);
    STAT(n_accepted);
}

int main(int argc, char ** argv) {
    if (argc == 2 && strcmp(argv[1], "abi") == 0) {
        print_abi();
        return 0;
    }
    if (argc != 4) {
        fprintf(stderr, "usage: %s TARGET DRAFT PROMPT\n", argv[0]);
        return 2;
    }

    static int n_lines = 0;
    llama_log_set(on_log, &n_lines);
    llama_backend_init();

    model_tgt = llama_model_load_from_file(argv[1], llama_model_default_params());
    model_dft = llama_model_load_from_file(argv[2], llama_model_default_params());
    path_dft  = argv[2];
    if (!model_tgt || !model_dft) {
        return 2;
    }
    n_prompt = llama_tokenize(llama_model_get_vocab(model_tgt), argv[3], (int32_t) strlen(argv[3]), prompt, N_PROMPT, false, false);
    if (n_prompt <= 0) {
        return 2;
    }

    check(llama_speculative_dflash_version() == LLAMA_SPECULATIVE_DFLASH_VERSION, "version", "of the header");
    check(strcmp(llama_speculative_dflash_last_error(), "") == 0, "error", "before any");
    test_refusals(argv[1]);
    printf("done refusals\n");
    test_text();
    printf("done text\n");
    test_stops();
    printf("done stops\n");
    test_state();
    printf("done state\n");
    test_given();
    printf("done given\n");

    /* the host's log callback is in place again */
    ggml_log_callback callback = NULL;
    void * user_data = NULL;
    llama_log_get(&callback, &user_data);
    check(callback == on_log && user_data == &n_lines && n_lines > 0, "log", "the callback");

    llama_model_free(model_dft);
    llama_model_free(model_tgt);
    llama_backend_free();
    printf("%s\n", n_failed == 0 ? "ok" : "failed");
    return n_failed > 0;
}
