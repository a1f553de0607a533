//! Answers that continue the last message of a chat: `continue_final_message`, `prefix`, and the forms of Anthropic and
//! Ollama.

use crate::common::refusals::merge;
use crate::common::scripted::{CHAT, TEMPLATE, body, call, saying_as, text, thinking, thought};
use crate::common::server::{Server, joined};
use crate::common::{Guess, Toy};
use crate::{http_messages, http_ollama};
use foretoken::http::AppState;
use foretoken::text::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const COMPLETION: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const OLLAMA_CHAT: &str = "/api/chat";

/// As Llama 3: a text is trimmed, and its turn is closed.
const LLAMA: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}";

/// As Mistral: an answer has no header, and is trimmed.
const MISTRAL: &str = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}";

/// As Gemma: it has names of its own, and closes a turn with a name and a line.
const GEMMA: &str = "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}";

fn chat(user: &str, last: &str) -> Value {
    json!({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": last}]})
}

fn continued(user: &str, last: &str) -> Value {
    with(&chat(user, last), &json!({"continue_final_message": true}))
}

/// `body` with more fields.
fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    merge(&mut body, more);
    body
}

async fn ids(server: &Server, body: &Value) -> Value {
    server.json("/tokenize", body).await["tokens"].clone()
}

/// The prompt is that of the completion of the same text, and so is the answer: with speculation and without, greedy
/// and sampled, whole and streamed, in all forms of asking for it.
#[tokio::test]
async fn an_answer_continues_the_last_message() {
    let fast = Server::start().await;
    let toy = Toy::guessing(Guess::Nothing);
    let plain = Server::of(toy.start()).await;
    for last in ["de f", "de ", " g\n", "", "<|end|>\n"] {
        let prompt = format!("<|start|>user abc\n<|start|>assistant {last}");
        let chat = continued("abc", last);
        let wanted = ids(&fast, &json!({"prompt": prompt})).await;
        assert_eq!(ids(&fast, &chat).await, wanted, "{last:?}");
        for temperature in [0, 1] {
            let more = json!({"temperature": temperature, "seed": 5, "max_tokens": 30});
            let text = plain
                .json(COMPLETION, &with(&json!({"prompt": prompt}), &more))
                .await["choices"][0]["text"]
                .clone();
            assert!(text.as_str().is_some_and(|text| text.len() > 5), "{text}");
            let mut marked = chat.clone();
            marked["continue_final_message"] = Value::Null;
            marked["messages"][1]["prefix"] = true.into();
            let explicit = with(&chat, &json!({"add_generation_prompt": false}));
            for asked in [&chat, &marked, &explicit] {
                let asked = with(asked, &more);
                for server in [&fast, &plain] {
                    let reply = server.json(CHAT, &asked).await;
                    assert_eq!(reply["choices"][0]["message"]["content"], text, "{asked}");
                    assert_eq!(
                        reply["usage"]["prompt_tokens"],
                        wanted.as_array().unwrap().len()
                    );
                }
                let (streamed, _) = joined(&fast.stream(CHAT, asked).await, 0);
                assert_eq!(text, streamed);
            }
            let of_ollama = with(&self::chat("abc", last), &more);
            let of_ollama = with(&of_ollama, &json!({"stream": false}));
            let reply = fast.json(OLLAMA_CHAT, &of_ollama).await;
            assert_eq!(reply["message"]["content"], text);
            assert_eq!(reply["prompt_eval_count"], wanted.as_array().unwrap().len());
            if last.ends_with(char::is_whitespace) {
                continue;
            }
            let message = with(&self::chat("abc", last), &more);
            let reply = fast.json(MESSAGES, &message).await;
            assert_eq!(reply["content"][0]["text"], text);
            let count = fast
                .json("/v1/messages/count_tokens", &self::chat("abc", last))
                .await;
            assert_eq!(count["input_tokens"], wanted.as_array().unwrap().len());
        }
    }
    // A last message that nobody asks to continue is closed, and a new one begins.
    let mut closed = chat("abc", "de");
    closed["messages"][1]["prefix"] = false.into();
    let prompt = "<|start|>user abc\n<|start|>assistant de\n<|start|>assistant\n";
    let wanted = ids(&fast, &json!({"prompt": prompt})).await;
    assert_eq!(ids(&fast, &closed).await, wanted);
    fast.done().await;
    plain.done().await;
}

#[tokio::test]
async fn prompts_end_before_what_closes_a_turn() {
    for (template, head) in [
        (
            LLAMA,
            "<|im_start|>user\n\nHi<|im_end|><|im_start|>assistant\n\n",
        ),
        (MISTRAL, "[INST] Hi[/INST] "),
        (
            GEMMA,
            "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            TEMPLATE,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
    ] {
        let server = saying_as(" yes.", template, |state| state).await;
        for last in ["Sure,", "Hi<|im_end|>", "<end_of_turn>\nHi", "Sure,\n "] {
            let kept = if template == TEMPLATE {
                last
            } else {
                last.trim()
            };
            let wanted = json!({"prompt": format!("{head}{kept}")});
            let wanted = ids(&server, &wanted).await;
            assert_eq!(ids(&server, &continued("Hi", last)).await, wanted, "{last}");
        }
        let reply = server.json(CHAT, &continued("Hi", "Sure,")).await;
        assert_eq!(reply["choices"][0]["message"]["content"], " yes.");
        server.done().await;
    }
}

/// What a client writes stays text in the message that is continued.
#[tokio::test]
async fn names_of_special_tokens_are_text_in_a_continued_message() {
    let literal = |state: AppState| state.with_special_parsed(false).expect("possible");
    let server = saying_as(" yes.", TEMPLATE, literal).await;
    let parsed = saying_as(" yes.", TEMPLATE, |state| state).await;
    let asked = continued("Hi", "a<|im_end|>b");
    let (split, whole) = (ids(&server, &asked).await, ids(&parsed, &asked).await);
    let list = |ids: &Value| -> Vec<u32> { serde_json::from_value(ids.clone()).expect("ids") };
    let special = |ids: &Value| list(ids).iter().filter(|&&id| id >= 256).count();
    assert_eq!((special(&split), special(&whole)), (3, 4));
    let model = text(TEMPLATE);
    let shown = model.decode(&list(&split), false);
    assert_eq!(shown, model.decode(&list(&whole), false));
    assert!(
        shown.ends_with("<|im_start|>assistant\na<|im_end|>b"),
        "{shown}"
    );
    let reply = server.json(CHAT, &asked).await;
    assert_eq!(reply["choices"][0]["message"]["content"], " yes.");
    server.done().await;
    parsed.done().await;
}

/// The message and the streamed reasoning and content of an answer.
async fn answer(
    says: &str,
    template: &str,
    configure: impl FnOnce(AppState) -> AppState,
    asked: Value,
) -> Value {
    let server = saying_as(says, template, configure).await;
    let choice = server.json(CHAT, &asked).await["choices"][0].clone();
    let chunks = server.stream(CHAT, asked).await;
    let message = &choice["message"];
    let of = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
    assert_eq!(joined(&chunks, 0).0, of("content"));
    assert_eq!(thought(&chunks), of("reasoning_content"));
    server.done().await;
    choice
}

#[tokio::test]
async fn a_continued_answer_is_content_and_an_open_thought_reasoning() {
    let r1 = |state: AppState| state.with_reasoning_parser(Some(ReasoningFormat::DeepseekR1));
    for says in [" yes.", "<think>no</think>"] {
        let asked = continued("Hi", "Sure,");
        for choice in [
            answer(says, TEMPLATE, thinking, asked.clone()).await,
            answer(says, TEMPLATE, r1, asked).await,
        ] {
            assert_eq!(choice["message"]["content"], says);
            assert!(choice["message"].get("reasoning_content").is_none());
        }
    }
    let says = " think.</think>\n\nYes.";
    let open = continued("Hi", "<think>\nI");
    // The template shows what the model thought before.
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}";
    let mut of_thought = continued("Hi", "");
    of_thought["messages"][1]["reasoning_content"] = "I".into();
    let object = json!({"response_format": {"type": "json_object"}});
    for (says, content, asked) in [
        (says, "Yes.", open.clone()),
        (says, "Yes.", of_thought),
        // A grammar rules the answer, all of which is to come.
        (
            " think.</think>\n\n{\"a\": 1}",
            "{\"a\": 1}",
            with(&open, &object),
        ),
    ] {
        let choice = answer(says, template, thinking, asked).await;
        assert_eq!(choice["message"]["reasoning_content"], " think.");
        assert_eq!(choice["message"]["content"], content);
    }
    // Without a parser it is a text.
    let choice = answer(says, template, |state| state, open).await;
    assert_eq!(choice["message"]["content"], " think.</think>\n\nYes.");
}

#[tokio::test]
async fn calls_may_follow_a_continued_answer() {
    let messages = continued("Hi", "I look.");
    let asked = with(&with(&body(), &messages), &json!({"temperature": 0}));
    let call_text = "{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}";
    let says = format!(" Now.\n<tool_call>{call_text}</tool_call>");
    let choice = answer(&says, TEMPLATE, |state| state, asked.clone()).await;
    assert_eq!(choice["message"]["content"], " Now.");
    let made = call(&choice["message"]["tool_calls"][0]);
    assert_eq!(made, ("add", "{\"a\": 1, \"b\": 2}"));
    // Where a call is all that a message has, an answer that has begun has none.
    let llama = |state: AppState| state.with_tool_call_parser(Some(ToolFormat::Llama3Json));
    let says = "{\"name\": \"add\", \"parameters\": {\"a\": 1, \"b\": 2}}";
    let choice = answer(says, TEMPLATE, llama, asked).await;
    assert_eq!(choice["message"]["content"], says);
    assert_eq!(choice["finish_reason"], "stop");
}

/// Harmony's parser reads in which channel the prompt ends.
#[tokio::test]
async fn an_answer_in_a_channel_is_continued() {
    const CHANNELS: &str = "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let choice = answer(" yes.", CHANNELS, |state| state, continued("Hi", "Sure,")).await;
    assert_eq!(choice["message"]["content"], " yes.");
    let mut thought = continued("Hi", "");
    thought["messages"][1]["reasoning_content"] = "I".into();
    let says = " think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
    let choice = answer(says, CHANNELS, |state| state, thought).await;
    assert_eq!(choice["message"]["reasoning_content"], " think.");
    assert_eq!(choice["message"]["content"], "Yes.");
}

#[tokio::test]
async fn what_cannot_be_continued_is_refused_by_name() {
    let server = saying_as("Yes.", TEMPLATE, |state| state).await;
    let good = continued("Hi", "Sure,");
    let user = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let mut early = chat("Hi", "Sure,");
    early["messages"][0]["prefix"] = true.into();
    let mut typed = chat("Hi", "Sure,");
    typed["messages"][1]["prefix"] = "yes".into();
    let mut calls = good.clone();
    calls["messages"][1]["tool_calls"] =
        json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    let mut thought = continued("Hi", "");
    thought["messages"][1]["reasoning_content"] = "Hm.".into();
    let tools = json!({"tools": body()["tools"], "tool_choice": "required"});
    for (asked, field) in [
        (
            with(&good, &json!({"add_generation_prompt": true})),
            "add_generation_prompt",
        ),
        (
            with(&user, &json!({"continue_final_message": true})),
            "messages[0].role",
        ),
        (early, "messages[0].prefix"),
        (typed, "messages[1].prefix"),
        (calls, "messages[1].tool_calls"),
        (thought, "messages"),
        (
            with(&good, &json!({"response_format": {"type": "json_object"}})),
            "response_format",
        ),
        (
            with(&good, &json!({"guided_choice": ["a"]})),
            "guided_choice",
        ),
        (with(&good, &tools), "tool_choice"),
    ] {
        let error = server.refused(CHAT, &asked).await;
        assert_eq!(error["param"], field, "{error}");
    }
    let prompt = json!({"prompt": "Hi", "continue_final_message": true});
    let refused = server.refused(COMPLETION, &prompt).await;
    assert_eq!(refused["param"], "continue_final_message");
    // As Anthropic does.
    let spaced = with(&chat("Hi", "Sure, "), &json!({"max_tokens": 5}));
    let refused = server.post(MESSAGES, &spaced).await;
    let (_, said) = http_messages::refused(refused, 400).await;
    assert!(
        said.starts_with("messages[1].content must not end with white space"),
        "{said}"
    );
    let format = with(&chat("Hi", "Sure,"), &json!({"format": "json"}));
    let said = http_ollama::refused(server.post(OLLAMA_CHAT, &format).await, 400).await;
    assert!(
        said.starts_with("format is not possible where the answer continues"),
        "{said}"
    );
    server.done().await;
}
