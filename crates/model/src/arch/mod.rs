//! The architectures: each is a function that takes the keys of a configuration and says what the layers are.

mod apertus;
mod bailing;
mod bamba;
mod deepseek;
mod ernie;
mod experts;
mod falcon_h1;
mod gemma;
mod gemma4;
mod glm;
mod gpt_oss;
mod granite4;
mod layer_norm;
mod lfm2;
mod llama;
mod mamba;
mod minimax;
mod muse_glimmer;
mod nemotron_h;
mod olmo;
mod parts;
mod phi;
mod qwen;
mod qwen_next;
mod rope;
mod wrapper;

use crate::config::keys::{Keys, ModelShape};
use crate::spec::ModelSpec;
pub use wrapper::{GEMMA4_ASSISTANTS, IMAGE_TENSORS, WRAPPERS};

/// An architecture of decoders.
pub struct Architecture {
    /// The `model_type` of the configuration.
    pub name: &'static str,
    /// The Hugging Face class.
    pub class: &'static str,
    /// The architecture's name in GGUF files, if it has one of its own.
    pub gguf: Option<&'static str>,
    /// What a model with these keys computes.
    pub spec: fn(&mut Keys, &ModelShape) -> Result<ModelSpec, String>,
    /// Renames keys, and sets those that a `config.json` need not have, because the class has defaults for them.
    pub defaults: fn(&mut Keys),
}

impl Architecture {
    pub const LLAMA: &'static Self = &ARCHITECTURES[0];

    /// One with the same name in GGUF files, and the defaults of Llama.
    const fn new(
        name: &'static str,
        class: &'static str,
        spec: fn(&mut Keys, &ModelShape) -> Result<ModelSpec, String>,
    ) -> Self {
        Self {
            name,
            class,
            gguf: Some(name),
            spec,
            defaults: |_| {},
        }
    }

    /// Whether `class` is its class, or the one without an output layer, as in `Qwen3Model`.
    pub fn has_class(&self, class: &str) -> bool {
        let base = self.class.strip_suffix("ForCausalLM");
        class == self.class || base.is_some() && class.strip_suffix("Model") == base
    }

    const fn in_gguf(self, gguf: Option<&'static str>) -> Self {
        Self { gguf, ..self }
    }

    const fn with(self, defaults: fn(&mut Keys)) -> Self {
        Self { defaults, ..self }
    }
}

/// Other names in GGUF files: of the decoders of classes for images and texts, which are these without images, and of
/// those with experts.
const GGUF_DECODERS: [(&str, &str); 3] = [
    ("nemotron_h_moe", "nemotron_h"),
    ("qwen2vl", "qwen2"),
    ("qwen3vl", "qwen3"),
];

/// The architecture that GGUF files call `name`.
pub fn of_gguf(name: &str) -> Option<&'static Architecture> {
    let decoder = GGUF_DECODERS.iter().find(|(theirs, _)| *theirs == name);
    let name = decoder.map_or(name, |(_, ours)| ours);
    ARCHITECTURES.iter().find(|arch| arch.gguf == Some(name))
}

/// A row for each architecture: its `model_type`, its class, and the function that says what it computes. Its name in GGUF
/// files and its defaults follow if they are not those of [`Architecture::new`].
macro_rules! architectures {
    ($($name:literal $class:literal $spec:path $(, $change:ident $value:expr)*;)*) => {
        &[$(Architecture::new($name, $class, $spec)$(.$change($value))*),*]
    };
}

pub const ARCHITECTURES: &[Architecture] = architectures! {
    "llama" "LlamaForCausalLM" llama::llama;
    // Embedding models of NVIDIA.
    "llama_bidirec" "LlamaBidirectionalModel" llama::bidirectional, in_gguf Some("llama-embed"), with llama::bidirectional_defaults;
    // In GGUF files it is a Llama.
    "mistral" "MistralForCausalLM" llama::mistral, in_gguf None, with llama::mistral_defaults;
    "ministral" "MinistralForCausalLM" llama::mistral, in_gguf None, with llama::mistral_defaults;
    "ministral3" "Ministral3ForCausalLM" llama::mistral, in_gguf Some("mistral3"), with llama::ministral3_defaults;
    // In GGUF files it is a Llama.
    "mixtral" "MixtralForCausalLM" llama::mixtral, in_gguf None, with llama::mixtral_defaults;
    "qwen2" "Qwen2ForCausalLM" qwen::qwen2;
    "mimo" "MiMoForCausalLM" qwen::mimo, in_gguf None;
    "qwen3" "Qwen3ForCausalLM" qwen::qwen3;
    "qwen2_moe" "Qwen2MoeForCausalLM" qwen::qwen2_moe, in_gguf Some("qwen2moe"), with qwen::qwen2_moe_defaults;
    "qwen3_moe" "Qwen3MoeForCausalLM" qwen::qwen3_moe, in_gguf Some("qwen3moe"), with qwen::qwen3_moe_defaults;
    "mellum" "MellumForCausalLM" qwen::mellum, with qwen::mellum_defaults;
    "qwen3_vl_moe_text" "Qwen3VLMoeTextModel" qwen::qwen3_vl_moe, in_gguf Some("qwen3vlmoe"), with qwen::qwen3_vl_moe_defaults;
    "qwen3_next" "Qwen3NextForCausalLM" qwen_next::next, in_gguf Some("qwen3next"), with qwen_next::next_defaults;
    "qwen3_5_text" "Qwen3_5ForCausalLM" qwen_next::dense, in_gguf Some("qwen35"), with qwen_next::dense_defaults;
    "qwen3_5_moe_text" "Qwen3_5MoeForCausalLM" qwen_next::moe, in_gguf Some("qwen35moe"), with qwen_next::moe_defaults;
    "phi3" "Phi3ForCausalLM" phi::phi3, with parts::eps_5;
    "gemma" "GemmaForCausalLM" gemma::gemma, with gemma::defaults;
    "gemma2" "Gemma2ForCausalLM" gemma::gemma2, with gemma::defaults2;
    "gemma3_text" "Gemma3ForCausalLM" gemma::gemma3, in_gguf Some("gemma3"), with gemma::defaults3;
    // EmbeddingGemma.
    "gemma_embedding" "Gemma3TextModel" gemma::gemma3, in_gguf Some("gemma-embedding"), with gemma::embedding_defaults;
    "gemma4_text" "Gemma4ForCausalLM" gemma4::gemma4, in_gguf Some("gemma4"), with gemma4::defaults;
    "gemma4_unified_text" "Gemma4UnifiedForCausalLM" gemma4::gemma4, in_gguf None, with gemma4::unified_defaults;
    "smollm3" "SmolLM3ForCausalLM" llama::smollm3, with llama::smollm3_defaults;
    "granite" "GraniteForCausalLM" llama::granite, with llama::granite_defaults;
    "arcee" "ArceeForCausalLM" llama::arcee, with parts::eps_5;
    "minicpm" "MiniCPMForCausalLM" llama::minicpm, with llama::minicpm_defaults;
    "granitemoe" "GraniteMoeForCausalLM" llama::granite_moe, with llama::granite_moe_defaults;
    // In GGUF files, those without Mamba layers are a Granite.
    "granitemoehybrid" "GraniteMoeHybridForCausalLM" granite4::granite4, in_gguf Some("granitehybrid"), with granite4::defaults;
    "olmo2" "Olmo2ForCausalLM" olmo::olmo2, with parts::eps_5;
    // In GGUF files it is an OLMo 2 with windows.
    "olmo3" "Olmo3ForCausalLM" olmo::olmo3, in_gguf None, with olmo::defaults3;
    "olmoe" "OlmoeForCausalLM" olmo::olmoe, with olmo::olmoe_defaults;
    "glm" "GlmForCausalLM" glm::glm, in_gguf Some("chatglm"), with glm::defaults;
    "seed_oss" "SeedOssForCausalLM" llama::seed_oss;
    "ernie4_5" "Ernie4_5ForCausalLM" ernie::ernie, with ernie::defaults;
    "ernie4_5_moe" "Ernie4_5_MoeForCausalLM" ernie::ernie_moe, in_gguf Some("ernie4_5-moe"), with ernie::moe_defaults;
    "exaone" "ExaoneForCausalLM" llama::exaone3, with llama::exaone3_defaults;
    "exaone4" "Exaone4ForCausalLM" llama::exaone4, with llama::exaone4_defaults;
    "cohere" "CohereForCausalLM" layer_norm::cohere, in_gguf Some("command-r"), with layer_norm::cohere_defaults;
    "cohere2" "Cohere2ForCausalLM" layer_norm::cohere2, with layer_norm::cohere2_defaults;
    "stablelm" "StableLmForCausalLM" layer_norm::stablelm, with layer_norm::stablelm_defaults;
    "starcoder2" "Starcoder2ForCausalLM" layer_norm::starcoder2, with layer_norm::starcoder2_defaults;
    "nemotron" "NemotronForCausalLM" layer_norm::nemotron, with layer_norm::nemotron_defaults;
    "bamba" "BambaForCausalLM" bamba::bamba, in_gguf None, with bamba::defaults;
    "falcon_h1" "FalconH1ForCausalLM" falcon_h1::falcon_h1, in_gguf Some("falcon-h1"), with falcon_h1::defaults;
    "nemotron_h" "NemotronHForCausalLM" nemotron_h::nemotron_h, with nemotron_h::defaults;
    "glm4" "Glm4ForCausalLM" glm::glm4, with glm::defaults;
    "glm4_moe" "Glm4MoeForCausalLM" glm::glm4_moe, in_gguf Some("glm4moe"), with glm::moe_defaults;
    // In GGUF files it is a GLM-4.5.
    "solar_open" "SolarOpenForCausalLM" glm::solar_open, in_gguf None, with glm::solar_open_defaults;
    // In GGUF files all of these are one.
    "deepseek_v2" "DeepseekV2ForCausalLM" deepseek::v2, in_gguf Some("deepseek2"), with deepseek::v2_defaults;
    "deepseek_v3" "DeepseekV3ForCausalLM" deepseek::v3, in_gguf None, with deepseek::v3_defaults;
    "glm4_moe_lite" "Glm4MoeLiteForCausalLM" deepseek::v3, in_gguf None, with deepseek::glm4_lite_defaults;
    "youtu" "YoutuForCausalLM" deepseek::youtu, in_gguf None, with deepseek::youtu_defaults;
    "hunyuan_v1_dense" "HunYuanDenseV1ForCausalLM" llama::hunyuan, in_gguf Some("hunyuan-dense"), with llama::hunyuan_defaults;
    "hunyuan_v1_moe" "HunYuanMoEV1ForCausalLM" llama::hunyuan_moe, in_gguf Some("hunyuan-moe"), with llama::hunyuan_defaults;
    "gpt_oss" "GptOssForCausalLM" gpt_oss::gpt_oss, in_gguf Some("gpt-oss"), with gpt_oss::defaults;
    "lfm2" "Lfm2ForCausalLM" lfm2::lfm2, with lfm2::defaults;
    "lfm2_moe" "Lfm2MoeForCausalLM" lfm2::lfm2_moe, in_gguf Some("lfm2moe"), with lfm2::moe_defaults;
    "minimax_m2" "MiniMaxM2ForCausalLM" minimax::minimax_m2, in_gguf Some("minimax-m2"), with minimax::defaults;
    "dots1" "Dots1ForCausalLM" qwen::dots1, with qwen::dots1_defaults;
    "bailing_moe_v2" "BailingMoeV2ForCausalLM" bailing::bailing_moe_v2, in_gguf Some("bailingmoe2"), with bailing::defaults;
    "muse_glimmer_text" "MuseGlimmerTextModel" muse_glimmer::muse_glimmer, in_gguf None, with muse_glimmer::defaults;
    "apertus" "ApertusForCausalLM" apertus::apertus, with apertus::defaults;
};
