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
    /// Prefixes of the keys that only sound needs, if the class takes sound.
    sound: &'static [&'static str],
}

pub const WRAPPERS: [Wrapper; 9] = [
    Wrapper {
        name: "gemma3",
        class: "Gemma3ForConditionalGeneration",
        text: "gemma3_text",
        sound: &[],
    },
    Wrapper {
        name: "gemma4",
        class: "Gemma4ForConditionalGeneration",
        text: "gemma4_text",
        sound: &SOUND_KEYS,
    },
    Wrapper {
        name: "gemma4_unified",
        class: "Gemma4UnifiedForConditionalGeneration",
        text: "gemma4_unified_text",
        sound: &SOUND_KEYS,
    },
    Wrapper {
        name: "mistral3",
        class: "Mistral3ForConditionalGeneration",
        text: "mistral",
        sound: &[],
    },
    // The three positions of a token, which they rotate by, are the same in texts.
    Wrapper {
        name: "qwen2_vl",
        class: "Qwen2VLForConditionalGeneration",
        text: "qwen2",
        sound: &[],
    },
    Wrapper {
        name: "qwen2_5_vl",
        class: "Qwen2_5_VLForConditionalGeneration",
        text: "qwen2",
        sound: &[],
    },
    Wrapper {
        name: "qwen3_vl",
        class: "Qwen3VLForConditionalGeneration",
        text: "qwen3",
        sound: &[],
    },
    Wrapper {
        name: "qwen3_5",
        class: "Qwen3_5ForConditionalGeneration",
        text: "qwen3_5_text",
        sound: &[],
    },
    Wrapper {
        name: "qwen3_5_moe",
        class: "Qwen3_5MoeForConditionalGeneration",
        text: "qwen3_5_moe_text",
        sound: &[],
    },
];

/// Prefixes of the names of the tensors that only images and sound need.
pub const IMAGE_TENSORS: [&str; 9] = [
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "vision_tower.",
    "visual.",
];

/// Prefixes of the keys that only sound needs.
const SOUND_KEYS: [&str; 3] = ["audio_", "boa_token", "eoa_token"];

/// Prefixes of the keys that only images need.
const IMAGE_KEYS: [&str; 9] = [
    "boi_token",
    "eoi_token",
    "image_token",
    "mm_tokens_per_image",
    "multimodal_projector",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token",
    "vision_",
];

impl Wrapper {
    /// The keys of the decoder of texts, and the name of its architecture.
    ///
    /// # Errors
    /// If `text_config` is not an object, or its `model_type` not a string.
    pub fn text(&self, mut keys: Keys) -> Result<(Keys, String), String> {
        let others = || IMAGE_KEYS.iter().chain(self.sound);
        keys.retain(|key| !others().any(|start| key.starts_with(start)));
        // Older files have all keys in one place.
        let inner = keys.nested("text_config")?;
        let mut inner = inner.unwrap_or_default();
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
