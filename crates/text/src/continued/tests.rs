use super::*;
use crate::template::tests::models::{DEEPSEEK_R1, GEMMA, GEMMA3, PHI, SMOLLM2};
use crate::tests::{byte_level, special, tokenizer};
use crate::tools::tests::templates::{LLAMA, MISTRAL, QWEN};
use serde_json::json;

/// As Llama 2: what is trimmed gets a space before and after it.
const SPACED: &str = "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}";

/// As Qwen 3: a message after the last question has its thought.
const THINKING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ (m.reasoning_content or '').strip('\\n') }}\n</think>\n\n{{ m.content.lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Byte-level, with BOS and EOS.
fn text(template: &str) -> Text {
    let file = byte_level(["<s>", "</s>"], |_| None);
    let special = special(Some(256), &[257]);
    Text::new(tokenizer(&file), special, Some(template)).expect("byte-level")
}

fn open_after(template: &str, user: &str, last: &Value) -> Result<RenderedChat> {
    let messages = [json!({"role": "user", "content": user}), last.clone()];
    let chat = Chat::of(&messages);
    text(template).render_open(chat, None)
}

fn open(template: &str, content: &str) -> Result<RenderedChat> {
    let last = json!({"role": "assistant", "content": content});
    open_after(template, "Hi", &last)
}

/// The prompt ends with the text, as far as the template keeps the space at its end.
#[test]
fn prompts_end_where_the_text_ends() {
    const LLAMA_HEAD: &str = "<|start_header_id|>assistant<|end_header_id|>\n\n";
    for (template, head, trims) in [
        (SMOLLM2, "<|im_start|>assistant\n", false),
        (QWEN, "<|im_start|>assistant\n", false),
        (GEMMA, "Hi<end_of_turn>\n<start_of_turn>model\n", true),
        (GEMMA3, "Hi<end_of_turn>\n<start_of_turn>assistant\n", true),
        (LLAMA, LLAMA_HEAD, true),
        (MISTRAL, "<s>[INST] Hi[/INST] ", true),
        (SPACED, "<s>[INST] Hi [/INST] ", true),
        (DEEPSEEK_R1, "<s><|User|>Hi<|Assistant|>", false),
        (PHI, "<|user|>Hi<|end|><|assistant|>", false),
        (THINKING, "<think>\n\n</think>\n\n", false),
    ] {
        for content in [
            "Sure,",
            "Sure, \n",
            " Sure,",
            "Hi",
            "i",
            "<|im_end|>\n",
            "</s>",
            "<end_of_turn>\n<end_of_turn>",
            "a <|eot_id|> b",
            "é\u{fdd1}",
            "<think>\nOh",
        ] {
            let rendered = open(template, content).expect(content);
            let kept = if trims { content.trim() } else { content };
            let wanted = format!("{head}{kept}");
            let prompt = &rendered.prompt;
            assert!(prompt.ends_with(&wanted), "{template}: {prompt:?}");
            let continued = if content.starts_with("<think>") {
                Continued::Thought
            } else {
                Continued::Content
            };
            assert_eq!(rendered.continued, Some(continued));
        }
        // Nothing is written yet: the model's answer begins.
        let rendered = open(template, "").expect("an empty one");
        assert!(rendered.prompt.ends_with(head), "{:?}", rendered.prompt);
        assert_eq!(rendered.continued, None);
    }
}

#[test]
fn a_thought_is_continued_where_there_is_no_content() {
    let mut last = json!({"role": "assistant", "content": "", "reasoning_content": "Hm, \n"});
    let rendered = open_after(THINKING, "Hi", &last).expect("written");
    assert!(rendered.prompt.ends_with("<think>\nHm, "), "{rendered:?}");
    assert_eq!(rendered.continued, Some(Continued::Thought));
    last["content"] = "So".into();
    let rendered = open_after(THINKING, "Hi", &last).expect("written");
    let wanted = "<think>\nHm, \n</think>\n\nSo";
    assert!(rendered.prompt.ends_with(wanted), "{rendered:?}");
    assert_eq!(rendered.continued, Some(Continued::Content));
    // Most templates know no thoughts.
    last["content"] = "".into();
    let error = open_after(SMOLLM2, "Hi", &last).unwrap_err().to_string();
    assert!(
        error.contains("does not write its reasoning_content"),
        "{error}"
    );
}

#[test]
fn what_a_template_changes_is_refused() {
    for template in [
        "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
    ] {
        let error = open(template, "Sure").unwrap_err();
        assert_eq!(error.param().as_deref(), Some("messages"), "{template}");
        assert!(
            error.to_string().contains("its content as it is"),
            "{error}"
        );
    }
    // No character is left that could mark a place.
    let all: String = MARKS.collect();
    let last = json!({"role": "assistant", "content": "Sure"});
    assert!(open_after(SMOLLM2, &all, &last).is_err());
    assert!(open_after(SMOLLM2, &all[3..], &last).is_ok());
}
