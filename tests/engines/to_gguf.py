"""llama.cpp's converter, without the tokenizer: LLAMA_CPP MODEL OUTPUT.gguf

It knows tokenizers by a hash, and refuses others. Tests compare logits of given tokens.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    archive, model, output = sys.argv[1:]
    sys.path.insert(0, archive)
    from conversion import base, deepseek, llama

    for kind in (llama.LlamaModel, deepseek.DeepseekV2Model):
        kind.set_vocab = base.TextModel._set_vocab_none
    script = Path(archive) / "convert_hf_to_gguf.py"
    sys.argv = [str(script), model, "--outtype", "f32", "--outfile", output]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
