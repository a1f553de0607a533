//! Classes for images, sound and texts: their decoder of texts is loaded, and nothing else.

use crate::config::keys::Keys;

/// A class for images and texts.
pub struct Wrapper {
    /// The `model_type` of the configuration.
    pub name: &'static str,
    /// The Hugging Face class.
    pub class: &'static str,
    /// The architecture of the decoder, unless the `model_type` of `text_config` is another one.
    text: &'static str,
    /// Whether the class takes sound.
    takes_sound: bool,
}

/// Gemma 4's draft heads: decoders of texts, with some keys of the classes of their targets.
pub const GEMMA4_ASSISTANTS: [Wrapper; 2] = [
    Wrapper::new(
        "gemma4_assistant",
        "Gemma4AssistantForCausalLM",
        "gemma4_text",
    )
    .with_sound(),
    Wrapper::new(
        "gemma4_unified_assistant",
        "Gemma4UnifiedAssistantForCausalLM",
        "gemma4_unified_text",
    )
    .with_sound(),
];

pub const WRAPPERS: [Wrapper; 13] = [
    Wrapper::new("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    Wrapper::new("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text").with_sound(),
    Wrapper::new(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
    )
    .with_sound(),
    Wrapper::new("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
    // The three positions of a token, which these rotate by, are the same in texts.
    Wrapper::new("glm4v", "Glm4vForConditionalGeneration", "glm4"),
    Wrapper::new("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4_moe"),
    Wrapper::new(
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        "muse_glimmer_text",
    ),
    Wrapper::new("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2"),
    Wrapper::new("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2"),
    Wrapper::new("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3"),
    Wrapper::new(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe_text",
    ),
    Wrapper::new("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    Wrapper::new(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text",
    ),
];

/// Prefixes of the names of the tensors that only images and sound need.
pub const IMAGE_TENSORS: [&str; 11] = [
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.multi_modal_projector.",
    "model.vision_adapter.",
    "model.vision_projection.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "vision_tower.",
    "visual.",
];

/// Prefixes of the keys that only sound needs.
const SOUND_KEYS: &str = "audio_ boa_token eoa_token";

/// Prefixes of the keys that only images need.
const IMAGE_KEYS: &str = "
    boi_token eoi_token image_end_token image_start_token image_token mm_tokens_per_image
    multimodal_projector out_hidden_size projector_hidden spatial_merge_size video_end_token
    video_start_token video_token vision_";

impl Wrapper {
    /// A class without sound.
    const fn new(name: &'static str, class: &'static str, text: &'static str) -> Self {
        Self {
            name,
            class,
            text,
            takes_sound: false,
        }
    }

    const fn with_sound(self) -> Self {
        Self {
            takes_sound: true,
            ..self
        }
    }

    /// The keys of the decoder of texts, and the name of its architecture.
    ///
    /// # Errors
    /// If `text_config` is not an object, or its `model_type` not a string.
    pub fn text(&self, mut keys: Keys) -> Result<(Keys, String), String> {
        let sound = if self.takes_sound { SOUND_KEYS } else { "" };
        let others = || {
            IMAGE_KEYS
                .split_whitespace()
                .chain(sound.split_whitespace())
        };
        let is_of_texts = |key: &str| !others().any(|start| key.starts_with(start));
        keys.retain(is_of_texts);
        // Older files have all keys in one place, and some have those of images among those of texts, too.
        let inner = keys.nested("text_config")?;
        let mut inner = inner.unwrap_or_default();
        inner.retain(is_of_texts);
        let kind = inner.text("model_type")?;
        inner.ignore("architectures");
        inner.add(
            keys,
            &["bos_token_id", "eos_token_id", "tie_word_embeddings"],
        );
        // Files tell whether it is so.
        inner.default("tie_word_embeddings", true);
        let own = format!("{}_text", self.name);
        let kind = kind.filter(|kind| *kind != own);
        Ok((inner, kind.unwrap_or_else(|| self.text.to_owned())))
    }
}
