//! `quantization_config`.

use super::awq::Awq;
use super::compressed::Compressed;
use super::fp4::Fp4;
use super::fp8::Fp8;
use super::gptq::Gptq;
use super::modules::Modules;
use super::nf4::Nf4;
use super::parts::Parts;
use super::scheme::Scheme;
use crate::config::keys::{Keys, ModelShape};
use serde_json::Value;
use std::sync::Arc;

/// The values of `quant_method` that are supported.
const METHODS: &str = "awq, bitsandbytes, compressed-tensors, fp8, gptq and modelopt";
const KEY: &str = "quantization_config";
/// The key of checkpoints that were converted for MLX, which may have the other one, too.
const MLX_KEY: &str = "quantization";
/// Maximum number of `config_groups`.
const MAX_GROUPS: usize = 64;
/// The prefix of the names of the matrices that are packed in random weights.
const LAYERS: &str = "model.layers.";

/// How the matrices of a checkpoint are packed.
#[derive(Debug, Clone)]
pub struct PackedConfig {
    /// The first that names a matrix is that of the matrix.
    groups: Vec<Group>,
    /// Matrices that are not packed.
    ignored: Modules,
}

#[derive(Debug, Clone)]
struct Group {
    /// `None` = all linear layers.
    modules: Option<Modules>,
    scheme: Arc<dyn Scheme>,
}

impl PackedConfig {
    /// Takes `quantization_config`, if there is one.
    ///
    /// # Errors
    /// A message that names what is not supported.
    pub fn take(keys: &mut Keys) -> Result<Option<Self>, String> {
        let mlx = keys.peek(MLX_KEY);
        if mlx.is_object() {
            let instead = "it is MLX's: take the model's other safetensors, or a GGUF file";
            return Err(keys.refused(MLX_KEY, &mlx, instead));
        }
        let value = keys.peek(KEY);
        let Some(mut inner) = keys.nested(KEY)? else {
            return Ok(None);
        };
        let in_it = |e: String| format!("{KEY}: {e}");
        let method = inner.text("quant_method").map_err(in_it)?;
        let read = match method.as_deref() {
            Some("awq") => Awq::take(&mut inner).map(one),
            Some("bitsandbytes") => Nf4::take(&mut inner).map(one),
            Some("gptq") => Gptq::take(&mut inner).map(one),
            Some("fp8") => Fp8::take(&mut inner).map(one),
            Some("compressed-tensors") => compressed_groups(&mut inner),
            Some("modelopt" | "modelopt_fp4") => modelopt(&mut inner),
            _ => {
                let accepted = format!("only a quant_method of {METHODS} is");
                return Err(keys.refused(KEY, &value, &accepted));
            }
        };
        let groups = read.map_err(in_it)?;
        inner.finish(&ModelShape::default()).map_err(in_it)?;
        let ignored = ignored(&value).map_err(in_it)?;
        Ok(Some(Self { groups, ignored }))
    }

    /// How the matrix with these `parts` is packed; `None` = it is not. `names` are its names in the code and in the
    /// checkpoint. The tensors decide: a matrix that is listed as not packed is what it is stored as.
    pub fn scheme(&self, names: [&str; 2], parts: &Parts<'_>) -> Option<&dyn Scheme> {
        let scheme = self.group(names)?;
        scheme.is_in(parts).then_some(scheme)
    }

    /// How random weights of the matrix `name` are packed.
    pub fn scheme_of_random(&self, name: &str) -> Option<&dyn Scheme> {
        let is_packed = name.starts_with(LAYERS) && !self.ignored.has(name);
        is_packed.then(|| self.group([name; 2])).flatten()
    }

    fn group(&self, names: [&str; 2]) -> Option<&dyn Scheme> {
        let names_it = |group: &&Group| {
            let modules = group.modules.as_ref();
            modules.is_some_and(|modules| names.iter().any(|name| modules.has(name)))
        };
        let by_name = self.groups.iter().find(names_it);
        let of_all = || self.groups.iter().find(|group| group.modules.is_none());
        by_name.or_else(of_all).map(|group| &*group.scheme)
    }
}

fn one(scheme: impl Scheme + 'static) -> Vec<Group> {
    vec![Group {
        modules: None,
        scheme: Arc::new(scheme),
    }]
}

/// The matrices that are not packed, under the names that the methods have for them.
fn ignored(value: &Value) -> Result<Modules, String> {
    let keys = [
        "ignore",
        "ignored_layers",
        "llm_int8_skip_modules",
        "modules_to_not_convert",
    ];
    let lists = keys.iter().filter_map(|key| value[*key].as_array());
    let names = lists.flatten().filter_map(|name| name.as_str());
    Modules::new(names.map(str::to_owned).collect())
}

/// Takes the keys of NVIDIA's Model Optimizer. What they say of activations, K and V is for programs that quantize them.
fn modelopt(keys: &mut Keys) -> Result<Vec<Group>, String> {
    keys.ignore("config_groups ignore kv_cache_scheme producer");
    let given = keys.peek("quant_algo");
    match keys.text("quant_algo")?.as_deref() {
        Some("FP8") => Ok(one(Fp8::OF_MATRICES)),
        Some("NVFP4") => Ok(one(Fp4::NvTimes)),
        _ => Err(keys.refused("quant_algo", &given, "only FP8 and NVFP4 are")),
    }
}

/// Takes the groups of compressed-tensors.
fn compressed_groups(keys: &mut Keys) -> Result<Vec<Group>, String> {
    keys.ignore("global_compression_ratio ignore quantization_status version");
    let sparsity = keys.peek("sparsity_config");
    if let Some(mut inner) = keys.nested("sparsity_config")? {
        inner
            .ignore("global_sparsity ignore registry_requires_subclass sparsity_structure targets");
        if inner
            .text("format")?
            .is_some_and(|format| format != "dense")
        {
            return Err(keys.refused("sparsity_config", &sparsity, "only a format of dense is"));
        }
        inner.finish(&ModelShape::default())?;
    }
    let format = keys.text("format")?;
    let given = keys.take("config_groups");
    let entries = given
        .as_object()
        .filter(|groups| !groups.is_empty() && groups.len() <= MAX_GROUPS);
    let Some(entries) = entries else {
        let accepted = format!("it must be an object of up to {MAX_GROUPS} groups");
        return Err(keys.refused("config_groups", &given, &accepted));
    };
    let groups = entries.iter().map(|(name, group)| {
        compressed_group(group, format.as_deref()).map_err(|e| format!("{name}: {e}"))
    });
    groups.collect()
}

fn compressed_group(group: &Value, format: Option<&str>) -> Result<Group, String> {
    let mut keys = Keys::of_json(group.clone())?;
    let targets = keys.texts("targets")?.unwrap_or_default();
    // What the activations of other programs become.
    keys.ignore("input_activations");
    let own = keys.text("format")?;
    let format = own.as_deref().or(format).unwrap_or("naive-quantized");
    let weights = keys.nested("weights")?.ok_or("weights are missing")?;
    let scheme = scheme_of(weights, format)?;
    keys.finish(&ModelShape::default())?;
    let modules = if targets.iter().any(|target| target == "Linear") {
        None
    } else {
        Some(Modules::new(targets)?)
    };
    Ok(Group { modules, scheme })
}

/// How the `weights` of a group with this format are packed.
fn scheme_of(mut weights: Keys, format: &str) -> Result<Arc<dyn Scheme>, String> {
    let fp4 = match format {
        "nvfp4-pack-quantized" => Fp4::Nv,
        "mxfp4-pack-quantized" => Fp4::Mx,
        _ => return Ok(Arc::new(Compressed::take(weights, format)?)),
    };
    weights.only("num_bits", 4)?;
    weights.only("type", "float")?;
    weights.only("symmetric", true)?;
    weights.only("dynamic", false)?;
    weights.only("group_size", fp4.group())?;
    weights
        .ignore("actorder block_structure observer observer_kwargs scale_dtype strategy zp_dtype");
    weights.finish(&ModelShape::default())?;
    Ok(Arc::new(fp4))
}
