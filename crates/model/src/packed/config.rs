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
use crate::names::Layout;
use serde_json::{Map, Value};
use std::sync::Arc;

/// The values of `quant_method` that are supported.
const METHODS: &str =
    "auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq and modelopt";
const KEY: &str = "quantization_config";
/// The key of checkpoints that were converted for MLX, which may have the other one, too.
const MLX_KEY: &str = "quantization";
/// Maximum number of `config_groups`, and of different settings of single matrices.
const MAX_GROUPS: usize = 64;
/// Bits of a matrix that AutoRound leaves as it is.
const BITS_OF_DENSE: u64 = 16;

/// Keys of AutoRound that say how numbers were found, which program reads them, and what activations may become.
const AUTO_ROUND: &str = "
    act_bits act_data_type act_dynamic act_group_size act_sym amp autoround_version backend batch_size
    block_name_to_quantize dataset enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr model_free nsamples
    quant_block_list quant_method scale_dtype seqlen supported_types to_quant_block_names vllm_backend";
/// Keys of Model Optimizer. What they say of activations, K and V is for programs that quantize them.
const MODEL_OPTIMIZER: &str = "config_groups ignore kv_cache_scheme producer quant_method";
/// The beginnings of parts of expressions that [`Modules`] does not read.
const LOOK_AROUND: [&str; 4] = ["(?=", "(?!", "(?<=", "(?<!"];
/// The prefix of the names of the matrices that are packed in random weights.
const LAYERS: &str = "model.layers.";

/// How the matrices of a checkpoint are packed.
#[derive(Debug, Clone)]
pub struct PackedConfig {
    groups: Groups,
    /// Matrices that are not packed.
    ignored: Modules,
}

/// What the keys of a method say.
#[derive(Debug, Clone, Default)]
struct Groups {
    named: Modules,
    /// How matrices are packed that `named` has at a place; `None` = they are not.
    schemes: Vec<Option<Arc<dyn Scheme>>>,
    /// How all other linear layers are packed.
    others: Option<Arc<dyn Scheme>>,
    /// Why only tensors tell of all matrices whether they are packed.
    unknown: Option<String>,
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
            Some("auto-round") => auto_round(&mut inner, &value),
            Some("awq") => Awq::take(&mut inner).map(one),
            Some("bitsandbytes") => Nf4::take(&mut inner).map(one),
            Some("fbgemm_fp8") => {
                inner.ignore("activation_scale_ub modules_to_not_convert");
                Ok(one(Compressed::FLOAT8_OF_OUTPUTS))
            }
            Some("gptq") => gptq(&mut inner, &value),
            Some("fp8") => Fp8::take(&mut inner).map(one),
            Some("compressed-tensors") => compressed_groups(&mut inner),
            Some("modelopt" | "modelopt_fp4" | "modelopt_mixed") => modelopt(&mut inner, &value),
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
        let groups = &self.groups;
        let named = groups.named.find(&names);
        let scheme = named.and_then(|place| groups.schemes[place].as_deref());
        let scheme = scheme.or(groups.others.as_deref())?;
        scheme.is_in(parts).then_some(scheme)
    }

    /// How random weights of the matrix `name` are packed.
    ///
    /// # Errors
    /// A message that names an expression without which this is not known.
    pub fn scheme_of_random(&self, name: &str) -> Result<Option<&dyn Scheme>, String> {
        if !name.starts_with(LAYERS) {
            return Ok(None);
        }
        let groups = &self.groups;
        if let Some(why) = &groups.unknown {
            return Err(format!("{KEY}: {why}"));
        }
        // There are no tensors that tell how the checkpoint names the decoder.
        let layouts = [Layout::Model, Layout::Inside, Layout::Outside];
        let names = layouts.map(|layout| layout.name(name));
        let names = names.each_ref().map(|name| &**name);
        if self.ignored.find(&names).is_some() {
            return Ok(None);
        }
        Ok(match groups.named.find(&names) {
            Some(place) => groups.schemes[place].as_deref(),
            None => groups.others.as_deref(),
        })
    }
}

fn one(scheme: impl Scheme + 'static) -> Groups {
    of_all(Arc::new(scheme))
}

/// All linear layers as one group.
fn of_all(scheme: Arc<dyn Scheme>) -> Groups {
    Groups {
        others: Some(scheme),
        ..Groups::default()
    }
}

/// The matrices that are not packed, under the names that the methods have for their list.
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

/// Takes the keys of GPTQ. `dynamic` has expressions for the beginnings of names, with settings of such matrices; after `-:`
/// they are those of matrices that are not packed.
fn gptq(keys: &mut Keys, all: &Value) -> Result<Groups, String> {
    let name = |pattern: &str, _: &Value| {
        let left_out = pattern.strip_prefix("-:");
        let pattern = left_out.or(pattern.strip_prefix("+:")).unwrap_or(pattern);
        (format!("re:{pattern}"), left_out.is_none())
    };
    let own = own_settings(keys, all, "dynamic", name, layout_of_gptq)?;
    Ok(Groups {
        others: Some(layout_of_gptq(keys)?),
        ..own
    })
}

fn layout_of_gptq(keys: &mut Keys) -> Result<Arc<dyn Scheme>, String> {
    Ok(Arc::new(Gptq::take(keys)?))
}

/// Takes the keys of Intel's AutoRound. `extra_config` has names of matrices, or expressions for parts of names, with
/// settings.
fn auto_round(keys: &mut Keys, all: &Value) -> Result<Groups, String> {
    let name = |module: &str, own: &Value| {
        let is_expression = module.contains(|c: char| "*+?^$()[]{}|\\".contains(c));
        let listed = if is_expression {
            format!("re:.*(?:{module})")
        } else {
            module.to_owned()
        };
        (listed, own["bits"].as_u64() < Some(BITS_OF_DENSE))
    };
    let own = own_settings(keys, all, "extra_config", name, layout_of_auto_round)?;
    Ok(Groups {
        others: Some(layout_of_auto_round(keys)?),
        ..own
    })
}

/// The layout of AutoRound's numbers, which is that of another method.
fn layout_of_auto_round(keys: &mut Keys) -> Result<Arc<dyn Scheme>, String> {
    keys.ignore(AUTO_ROUND);
    keys.only("data_type", "int")?;
    let given = keys.peek("packing_format");
    match keys.text("packing_format")?.as_deref() {
        None | Some("auto_round:auto_gptq") => {}
        Some("auto_round" | "auto_round:gptqmodel") => keys.set("checkpoint_format", "gptq_v2"),
        Some("auto_round:auto_awq") => {
            // Zero points are stored in either case.
            keys.ignore("sym");
            return Ok(Arc::new(Awq::take(keys)?));
        }
        Some(_) => {
            let accepted =
                "only auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq are";
            return Err(keys.refused("packing_format", &given, accepted));
        }
    }
    layout_of_gptq(keys)
}

/// Takes the keys of NVIDIA's Model Optimizer. With MIXED_PRECISION, `quantized_layers` has names of matrices, with settings.
fn modelopt(keys: &mut Keys, all: &Value) -> Result<Groups, String> {
    const LIST: &str = "quantized_layers";
    if keys.peek("quant_algo") != "MIXED_PRECISION" {
        return Ok(of_all(algorithm(keys)?));
    }
    keys.ignore(MODEL_OPTIMIZER);
    keys.ignore("quant_algo");
    let name = |module: &str, _: &Value| (module.to_owned(), true);
    let groups = own_settings(keys, all, LIST, name, algorithm)?;
    if groups.schemes.is_empty() {
        return Err(keys.missing(LIST));
    }
    Ok(groups)
}

/// How Model Optimizer packs matrices.
fn algorithm(keys: &mut Keys) -> Result<Arc<dyn Scheme>, String> {
    keys.ignore(MODEL_OPTIMIZER);
    let given = keys.peek("quant_algo");
    match keys.text("quant_algo")?.as_deref() {
        Some("FP8") => Ok(Arc::new(Fp8::OF_MATRICES)),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => Ok(Arc::new(Compressed::FLOAT8_OF_OUTPUTS)),
        // They differ in what becomes of activations.
        Some("NVFP4" | "W4A16_NVFP4") => {
            keys.only("group_size", Fp4::NvTimes.group())?;
            Ok(Arc::new(Fp4::NvTimes))
        }
        _ => {
            let accepted =
                "only FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4 and MIXED_PRECISION are";
            Err(keys.refused("quant_algo", &given, accepted))
        }
    }
}

/// Settings, and what is read from them.
type Kind<'a> = (&'a Map<String, Value>, Arc<dyn Scheme>);

/// Takes `key`, whose entries have settings of some matrices in place of those of `all`. `name` makes of an entry what
/// [`Modules`] reads, and says whether its matrices are packed. `scheme` reads the settings.
fn own_settings(
    keys: &mut Keys,
    all: &Value,
    key: &str,
    name: impl Fn(&str, &Value) -> (String, bool),
    scheme: impl Fn(&mut Keys) -> Result<Arc<dyn Scheme>, String>,
) -> Result<Groups, String> {
    let given = keys.take(key);
    let refused = |accepted: &str| keys.refused(key, &given, accepted);
    let in_it = |e: String| format!("{key}: {e}");
    let scheme_with = |own: &Map<String, Value>| {
        let mut settings = all.clone();
        settings[key] = Value::Null;
        for (setting, value) in own {
            settings[setting] = value.clone();
        }
        let mut settings = Keys::of_json(settings)?;
        let scheme = scheme(&mut settings)?;
        settings.finish(&ModelShape::default())?;
        Ok::<_, String>(scheme)
    };
    let entries = match &given {
        Value::Null => return Ok(Groups::default()),
        given => given
            .as_object()
            .ok_or_else(|| refused("it must be an object"))?,
    };
    let (mut names, mut schemes, mut unknown) = (Vec::new(), Vec::new(), None);
    let mut kinds: Vec<Kind> = Vec::new();
    for (entry, own) in entries {
        let (listed, is_packed) = name(entry, own);
        if !is_packed {
            if LOOK_AROUND.iter().any(|start| listed.contains(start)) {
                // Files have other tensors for matrices that are not packed.
                let accepted = "random weights need an expression without look-around";
                unknown = Some(keys.refused(key, &entry.as_str().into(), accepted));
            } else {
                names.push(listed);
                schemes.push(None);
            }
            continue;
        }
        let own = own.as_object();
        let own = own.ok_or_else(|| refused("its entries must be objects"))?;
        let known = kinds.iter().find(|(known, _)| *known == own);
        let scheme = match known {
            Some((_, known)) => known.clone(),
            None if kinds.len() < MAX_GROUPS => {
                let scheme = scheme_with(own).map_err(in_it)?;
                kinds.push((own, scheme.clone()));
                scheme
            }
            None => {
                let accepted = format!("only {MAX_GROUPS} different settings are");
                return Err(refused(&accepted));
            }
        };
        names.push(listed);
        schemes.push(Some(scheme));
    }
    Ok(Groups {
        named: Modules::new(names).map_err(in_it)?,
        schemes,
        others: None,
        unknown,
    })
}

/// Takes the groups of compressed-tensors.
fn compressed_groups(keys: &mut Keys) -> Result<Groups, String> {
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
    let (mut names, mut schemes, mut others) = (Vec::new(), Vec::new(), None);
    for (name, group) in entries {
        let read = compressed_group(group, format.as_deref());
        let (targets, scheme) = read.map_err(|e| format!("{name}: {e}"))?;
        if targets.iter().any(|target| target == "Linear") {
            others.get_or_insert(scheme);
        } else {
            schemes.extend(targets.iter().map(|_| Some(scheme.clone())));
            names.extend(targets);
        }
    }
    Ok(Groups {
        named: Modules::new(names).map_err(|e| format!("config_groups: {e}"))?,
        schemes,
        others,
        unknown: None,
    })
}

/// The matrices of a group, and how they are packed.
fn compressed_group(
    group: &Value,
    format: Option<&str>,
) -> Result<(Vec<String>, Arc<dyn Scheme>), String> {
    let mut keys = Keys::of_json(group.clone())?;
    let targets = keys.texts("targets")?.unwrap_or_default();
    // What the activations of other programs become.
    keys.ignore("input_activations");
    let own = keys.text("format")?;
    let format = own.as_deref().or(format).unwrap_or("naive-quantized");
    let weights = keys.nested("weights")?.ok_or("weights are missing")?;
    let scheme = scheme_of(weights, format)?;
    keys.finish(&ModelShape::default())?;
    Ok((targets, scheme))
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
