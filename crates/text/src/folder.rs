//! Tokenizers and chat templates in the files of a model folder.

use super::sentencepiece::around;
use super::{SpecialIds, Text, encode, read_tokenizer};
use foretoken_core::error::{Error, Result, caught};
use foretoken_core::files;
use serde_json::{Value, json};
use std::path::Path;
use tokenizers::Tokenizer;

impl Text {
    /// Writes `tokenizer.json` and `tokenizer_config.json` into `folder`, for [`Text::from_folder`]. They
    /// contain only the first EOS id; the others belong in the `config.json` beside them.
    ///
    /// # Errors
    /// `Setup`, naming the folder, if the files cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let name = |id: Option<u32>| self.token_name(id?);
        let named = |name, template| json!({"name": name, "template": template});
        let all = self.chat_template();
        let config = json!({
            "bos_token": name(self.special.bos),
            "eos_token": name(self.eos),
            "pad_token": name(self.pad),
            "chat_template": match self.tool_template() {
                None => json!(all),
                tools => json!([named(DEFAULT, all), named(TOOL_USE, tools)]),
            },
        });
        self.tokenizer
            .save(folder.join("tokenizer.json"), false)
            .and_then(|()| {
                let file = folder.join("tokenizer_config.json");
                let config = serde_json::to_string_pretty(&config)?;
                Ok(std::fs::write(file, config + "\n")?)
            })
            .map_err(|e| {
                let folder = folder.display();
                Error::setup(format!("cannot write the tokenizer into {folder}: {e}"))
            })
    }

    /// Reads `tokenizer.json` and, if they exist, `tokenizer_config.json`,
    /// `generation_config.json`, `config.json`, `chat_template.jinja`, `additional_chat_templates/tool_use.jinja` and
    /// `chat_template.json` of a model folder.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        caught("the tokenizer", || Self::read_folder(folder))
    }

    fn read_folder(folder: &Path) -> Result<Self> {
        let file = folder.join("tokenizer.json");
        if !file.exists() {
            let has = ["tokenizer.model", "vocab.json", "spiece.model"];
            let other = has.iter().find(|name| folder.join(name).exists());
            let remedy = match other {
                Some(name) => format!(
                    "it has {name}, from which transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
                ),
                // Those of Mistral and Moonshot, which the Hub's cache does not get.
                None => "copy it from a repository of the model that has one, or take a GGUF file; tekken.json and tiktoken.model are not read".to_owned(),
            };
            let what = format!("there is no tokenizer.json: {remedy}");
            return Err(Error::in_file(folder, what));
        }
        let mut tokenizer =
            read_tokenizer(&files::read_text(&file)?).map_err(|e| Error::in_file(&file, e))?;
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        add_bos(&mut tokenizer, &config)?;
        let id = |key: &str| token_name(&config, key).and_then(|name| tokenizer.token_to_id(name));
        let mut eos: Vec<u32> = id("eos_token").into_iter().collect();
        for file in ["generation_config.json", "config.json"] {
            eos.extend(ids_under(&read_json(&folder.join(file))?, "eos_token_id"));
        }
        let (bos, pad) = (id("bos_token"), id("pad_token"));
        let special = SpecialIds { bos, eos };
        if let Some(source) = files::read_text_if_any(&folder.join("chat_template.jinja"))? {
            let text = Self::new(tokenizer, special, Some(&source))?;
            // As transformers reads it, which ignores the templates of `tokenizer_config.json` then.
            let tools = files::read_text_if_any(&folder.join(TOOL_USE_FILE))?;
            return Ok(Self {
                pad,
                tool_template: text.compile_template(tools.as_deref())?,
                ..text
            });
        }
        // Models that also read images have this file.
        let other = read_json(&folder.join("chat_template.json"))?;
        let source = template_source(&config).or(template_source(&other));
        let text = Self::new(tokenizer, special, source)?;
        let tool_template = text.compile_template(named_template(&config, TOOL_USE))?;
        Ok(Self {
            pad,
            tool_template,
            ..text
        })
    }
}

/// Classes of transformers that put BOS first if `add_bos_token` says so, also where `tokenizer.json` does not, as that
/// of DeepSeek does not. `Fast` may follow.
const ADDING_BOS: [&str; 4] = [
    "CodeLlamaTokenizer",
    "CohereTokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
];

/// Makes `tokenizer` put BOS first if its class does.
fn add_bos(tokenizer: &mut Tokenizer, config: &Value) -> Result<()> {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let class = class.strip_suffix("Fast").unwrap_or(class);
    if !ADDING_BOS.contains(&class) || config["add_bos_token"] != true {
        return Ok(());
    }
    let special = |key: &str| {
        let name = token_name(config, key)?;
        Some((tokenizer.token_to_id(name)?, name))
    };
    let Some(bos) = special("bos_token") else {
        return Ok(());
    };
    let eos = special("eos_token").filter(|_| config["add_eos_token"] == true);
    if encode(tokenizer, "", true)?.first() != Some(&bos.0) {
        tokenizer.with_post_processor(Some(around(Some(bos), eos)?));
    }
    Ok(())
}

/// Reads a JSON file; `Null` if it does not exist.
fn read_json(file: &Path) -> Result<Value> {
    let Some(text) = files::read_text_if_any(file)? else {
        return Ok(Value::Null);
    };
    files::parse_json(&text).map_err(|e| Error::in_file(file, e))
}

/// `"eos_token": "</s>"` or `"eos_token": {"content": "</s>", ...}`.
fn token_name<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let value = &config[key];
    value.as_str().or_else(|| value["content"].as_str())
}

/// `"eos_token_id": 2` or `"eos_token_id": [2, 3]`.
fn ids_under(config: &Value, key: &str) -> Vec<u32> {
    let value = &config[key];
    let one = std::slice::from_ref(value);
    let ids = value.as_array().map_or(one, Vec::as_slice).iter();
    ids.filter_map(|id| id.as_u64()?.try_into().ok()).collect()
}

/// The names of templates in a list: for all chats, and for those with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// The file of the second, beside a `chat_template.jinja` with the first.
const TOOL_USE_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// `chat_template` is one template, or a list of named ones, of which `default` or the first is used.
fn template_source(config: &Value) -> Option<&str> {
    let value = &config["chat_template"];
    let first = || value.as_array()?.first()?["template"].as_str();
    let source = value.as_str().or_else(|| named_template(config, DEFAULT));
    source.or_else(first)
}

/// The template `name`, if `chat_template` is a list that has it.
fn named_template<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    let list = config["chat_template"].as_array()?;
    list.iter().find(|t| t["name"] == name)?["template"].as_str()
}
