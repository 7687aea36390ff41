// Writes the logits that llama.cpp computes: llama_logits MODEL.gguf IDS OUTPUT exact|default|q8_0|q4_0
// IDS are int32, OUTPUT gets float32 [tokens, words]. "exact" has a cache in float32 and no flash attention; "default" has what
// llama.cpp chooses, a cache in float16 and flash attention where it can; the others have a cache in that format and flash
// attention, without which it does not start. The exit status says what failed.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc != 5) return 2;
    std::vector<llama_token> ids;
    FILE * in = fopen(argv[2], "rb");
    for (int32_t id; in && fread(&id, sizeof id, 1, in) == 1;) ids.push_back(id);
    if (ids.empty()) return 2;
    fclose(in);

    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 3;
    llama_context_params params = llama_context_default_params();
    params.n_ubatch = 512;  // longer prompts are read in parts
    params.n_ctx = params.n_batch = (uint32_t) (ids.size() + 511) / 512 * 512;
    params.n_threads = params.n_threads_batch = 1;  // several would wait in loops, also for other programs
    if (!strcmp(argv[4], "exact")) {
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    } else if (strcmp(argv[4], "default")) {
        params.type_k = params.type_v = strcmp(argv[4], "q8_0") ? GGML_TYPE_Q4_0 : GGML_TYPE_Q8_0;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 4;

    llama_batch batch = llama_batch_init((int32_t) ids.size(), 0, 1);
    batch.n_tokens = (int32_t) ids.size();
    for (size_t i = 0; i < ids.size(); i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = (llama_pos) i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 5;

    const int words = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = fopen(argv[3], "wb");
    if (!out) return 6;
    for (int32_t i = 0; i < batch.n_tokens; i++) fwrite(llama_get_logits_ith(context, i), sizeof(float), words, out);
    return fclose(out) ? 6 : 0;
}
