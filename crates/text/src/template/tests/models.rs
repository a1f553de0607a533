//! Templates with the constructs of models that people run: each must still work within the bounds. Those
//! of Qwen 2.5, Llama 3.1 and Mistral are in `tools/tests/templates.rs`.

use super::super::{Chat, ChatTemplate};
use serde_json::{Map, Value, json};

pub(crate) const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

pub(crate) const GEMMA: &str = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}";

pub(crate) const GEMMA3: &str = "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = \"\" -%}{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}{{ '<start_of_turn>' + message['role'] + '\n' + (first_user_prefix if loop.first else \"\") }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}{{ raise_exception(\"Invalid content type\") }}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}";

pub(crate) const DEEPSEEK_R1: &str = "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}";

const QWEN3: &str = "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and message.role == \"user\" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}{%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- elif message.role == \"assistant\" %}{%- set reasoning_content = '' %}{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- if loop.index0 > ns.last_query_index and reasoning_content %}{{- '<think>' + reasoning_content.strip('\\n') }}{%- endif %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";

pub(crate) const PHI: &str = "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}";

const HERMES: &str = "{%- macro json_to_python_type(json_spec) %}{%- set basic_type_map = {\"string\": \"str\", \"number\": \"float\", \"integer\": \"int\"} %}{%- if basic_type_map[json_spec.type] is defined %}{{- basic_type_map[json_spec.type] }}{%- elif json_spec.type == \"array\" %}{{- \"list[\" + json_to_python_type(json_spec|items) + \"]\" }}{%- elif json_spec.type is iterable %}{{- \"Union[\" }}{%- for t in json_spec.type %}{{- json_to_python_type({\"type\": t}) }}{%- if not loop.last %}{{- \",\" }}{%- endif %}{%- endfor %}{{- \"]\" }}{%- else %}{{- \"Any\" }}{%- endif %}{%- endmacro %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{{- json_to_python_type({'type': ['string', 'integer']}) }}{%- endfor %}";

fn prompt(source: &str, messages: Value, thinking: bool) -> String {
    let template = ChatTemplate::new(source, Some("<s>"), Some("</s>")).unwrap();
    let extra = Map::from_iter([("enable_thinking".to_owned(), thinking.into())]);
    let chat = Chat {
        messages: messages.as_array().unwrap(),
        tools: &[],
        add_generation_prompt: true,
        extra: &extra,
    };
    template.render(&chat).unwrap()
}

#[test]
fn known_templates_work() {
    let chat = json!([
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes?"},
        {"role": "user", "content": "Bye"},
    ]);
    for (source, expected) in [
        (
            SMOLLM2,
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            GEMMA,
            "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<think>\nhm\n</think>\n\nYes?<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            GEMMA3,
            "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>assistant\n<think>\nhm\n</think>\n\nYes?<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n",
        ),
        (
            DEEPSEEK_R1,
            "<s><|User|> Hi <|Assistant|>\n\nYes?<|end|><|User|>Bye<|Assistant|><think>\n",
        ),
        (
            QWEN3,
            "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            PHI,
            "<|user|> Hi <|end|><|assistant|><think>\nhm\n</think>\n\nYes?<|end|><|user|>Bye<|end|><|assistant|>",
        ),
    ] {
        assert_eq!(prompt(source, chat.clone(), false), expected);
    }
    let one = json!([{"role": "user", "content": "a"}]);
    assert_eq!(
        prompt(HERMES, one, true),
        "<|im_start|>user\na<|im_end|>\nUnion[str,int]"
    );
}

/// A long conversation is far within the bounds.
#[test]
fn long_conversations_fit() {
    let messages: Vec<Value> = (0..2_000)
        .map(|i| {
            let role = if i % 2 == 0 { "user" } else { "assistant" };
            json!({"role": role, "content": "word ".repeat(200)})
        })
        .collect();
    for source in [SMOLLM2, GEMMA, DEEPSEEK_R1, QWEN3, PHI] {
        let text = prompt(source, messages.clone().into(), true);
        assert!(text.len() > 1_900_000, "{}", text.len());
    }
}
