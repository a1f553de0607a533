//! Reads position embeddings. transformers 5 stores them in `rope_parameters`, older versions in `rope_theta` and
//! `rope_scaling`; a file may have both.

use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::{
    Llama3Scaling, LongFactors, LongScaling, ProportionalScaling, QueryScaling, RopeScaling,
    RopeSpec, YarnScaling,
};
use serde_json::Value;

/// Maximum number of factors of a rotation: half the widest head.
const MAX_FACTORS: usize = 2048;

/// The keys of a position embedding that one place of the configuration has.
#[derive(Default)]
struct RopeEntry {
    theta: Option<f64>,
    partial: Option<f64>,
    scaling: Option<RopeScaling>,
    query_scaling: Option<QueryScaling>,
}

/// The position embedding that all layers share, of whole heads.
pub fn rope(keys: &mut Keys, shape: &ModelShape) -> Result<RopeSpec, String> {
    shared(keys, shape, None)
}

/// As [`rope`](fn@rope), but of a part of each head. `partial_rotary_factor` says the part; without it, the part is
/// `by_default`.
pub fn partial_rope(
    keys: &mut Keys,
    shape: &ModelShape,
    by_default: f64,
) -> Result<RopeSpec, String> {
    shared(keys, shape, Some(by_default))
}

/// Sets the base that a class assumes if no place says it.
pub fn default_theta(keys: &mut Keys, theta: f64) {
    let says = |place: &str| !keys.peek(place)["rope_theta"].is_null();
    let is_said = !keys.peek("rope_theta").is_null() || says("rope_parameters");
    if !is_said && !says("rope_scaling") && !keys.is_gguf() {
        keys.set("rope_theta", theta);
    }
}

/// Sets the position embedding that a class assumes if no place has one. A base that stands alone is of it.
pub fn default_rope(keys: &mut Keys, mut rope: Value) {
    let is_missing = |place| keys.peek(place).is_null();
    if is_missing("rope_parameters") && is_missing("rope_scaling") && !keys.is_gguf() {
        let theta = keys.take("rope_theta");
        if !theta.is_null() {
            rope["rope_theta"] = theta;
        }
        keys.set("rope_parameters", rope);
    }
}

/// Position embeddings of layers without a window and of those with one. Only the first may be scaled, unless
/// `rope_parameters` has both. Their bases are `theta` and `local_theta` if nothing is specified; `None` = that of the
/// others.
pub fn ropes_by_kind(
    keys: &mut Keys,
    shape: &ModelShape,
    theta: f64,
    local_theta: Option<f64>,
) -> Result<(RopeSpec, RopeSpec), String> {
    let mut full = RopeEntry {
        theta: keys.number("rope_theta")?,
        scaling: gguf_scaling(keys, shape)?,
        ..RopeEntry::default()
    };
    let local = keys.number("rope_local_base_freq")?;
    let mut sliding = RopeEntry {
        // llama.cpp's name.
        theta: local.or(keys.number("rope.freq_base_swa")?),
        ..RopeEntry::default()
    };
    if let Some(mut both) = keys.nested("rope_parameters")? {
        for (kind, to) in [
            ("full_attention", &mut full),
            ("sliding_attention", &mut sliding),
        ] {
            if let Some(inner) = both.nested(kind)? {
                *to = entry(inner, shape, false, None)?;
            }
        }
        both.finish(shape)?;
    }
    if let Some(inner) = keys.nested("rope_scaling")? {
        let inner = entry(inner, shape, false, None)?;
        if let Some(queries) = inner.query_scaling {
            let accepted = "beside two position embeddings, it may only be in rope_parameters";
            let beta = queries.beta.into();
            return Err(keys.refused("llama_4_scaling_beta", &beta, accepted));
        }
        full.theta = same("rope_theta", [full.theta, inner.theta].into_iter())?;
        full.scaling = inner.scaling;
    }
    let theta = full.theta.unwrap_or(theta);
    Ok((
        of_entry(&full, shape.head_dim, theta),
        of_entry(&sliding, shape.head_dim, local_theta.unwrap_or(theta)),
    ))
}

fn of_entry(entry: &RopeEntry, width: usize, theta: f64) -> RopeSpec {
    RopeSpec {
        scaling: entry.scaling.clone(),
        query_scaling: entry.query_scaling,
        ..RopeSpec::plain(width, entry.theta.unwrap_or(theta) as f32)
    }
}

fn shared(keys: &mut Keys, shape: &ModelShape, partial: Option<f64>) -> Result<RopeSpec, String> {
    let original = keys.size("original_max_position_embeddings")?;
    let mut entries = vec![RopeEntry {
        theta: keys.number("rope_theta")?,
        partial: match partial {
            Some(_) => keys.number("partial_rotary_factor")?,
            None => None,
        },
        ..RopeEntry::default()
    }];
    for place in ["rope_parameters", "rope_scaling"] {
        if let Some(inner) = keys.nested(place)? {
            entries.push(entry(inner, shape, partial.is_some(), original)?);
        }
    }
    let theta = same("rope_theta", entries.iter().map(|entry| entry.theta))?;
    let factor = same(
        "partial_rotary_factor",
        entries.iter().map(|entry| entry.partial),
    )?;
    let places = &entries[1..];
    let first = places.first();
    if places
        .iter()
        .any(|entry| Some(&entry.scaling) != first.map(|first| &first.scaling))
    {
        return Err("rope_parameters and rope_scaling must be the same".into());
    }
    let (scaling, query_scaling) = match entries.pop() {
        Some(entry) if !entries.is_empty() => (entry.scaling, entry.query_scaling),
        _ => {
            let scaling = gguf_scaling(keys, shape)?;
            let key = "attention.temperature_scale";
            let beta = keys.number(key)?.filter(|&beta| beta != 0.);
            let accepted = "it needs a rope scaling of yarn";
            let queries = query_scaling(keys, (key, beta), scaling.as_ref(), accepted)?;
            (scaling, queries)
        }
    };
    let width = match partial {
        None => shape.head_dim,
        Some(_) if keys.is_gguf() => keys.size("rope.dimension_count")?.unwrap_or(shape.head_dim),
        Some(by_default) => (shape.head_dim as f64 * factor.unwrap_or(by_default)) as usize,
    };
    let entry = RopeEntry {
        theta,
        partial,
        scaling,
        query_scaling,
    };
    Ok(of_entry(&entry, width, 10_000.))
}

/// The value of `key` in all places that have one.
fn same(key: &str, values: impl Iterator<Item = Option<f64>>) -> Result<Option<f64>, String> {
    let values: Vec<f64> = values.flatten().collect();
    match values.iter().find(|&value| *value != values[0]) {
        Some(other) => Err(format!(
            "{key} is both {} and {other}: they must be the same",
            values[0]
        )),
        None => Ok(values.first().copied()),
    }
}

/// Reads all of `rope_scaling` or `rope_parameters`, of a model with this context before scaling, if it says so
/// elsewhere.
fn entry(
    mut keys: Keys,
    shape: &ModelShape,
    partial: bool,
    original: Option<usize>,
) -> Result<RopeEntry, String> {
    for kind in ["full_attention", "sliding_attention", "chunked_attention"] {
        let own = keys.take(kind);
        if !own.is_null() {
            return Err(keys.refused(kind, &own, "all layers must have the same RoPE"));
        }
    }
    let scaling = scaling(&mut keys, shape, original)?;
    if partial && matches!(scaling, Some(RopeScaling::Proportional(_))) {
        return Err("rope_type proportional is not supported for this architecture".into());
    }
    let key = "llama_4_scaling_beta";
    let beta = (key, keys.number(key)?);
    let accepted = "it needs the rope_type yarn";
    let query_scaling = query_scaling(&keys, beta, scaling.as_ref(), accepted)?;
    let entry = RopeEntry {
        theta: keys.number("rope_theta")?,
        partial: if partial {
            keys.number("partial_rotary_factor")?
        } else {
            None
        },
        scaling,
        query_scaling,
    };
    keys.finish(shape)?;
    Ok(entry)
}

/// The frequency scaling in `rope_scaling` or `rope_parameters`.
fn scaling(
    keys: &mut Keys,
    shape: &ModelShape,
    original: Option<usize>,
) -> Result<Option<RopeScaling>, String> {
    // transformers 5 may write both names.
    let (new, old) = (keys.text("rope_type")?, keys.text("type")?);
    if let (Some(new), Some(old)) = (&new, &old)
        && new != old
    {
        return Err(format!(
            "rope_type '{new}' and type '{old}' must be the same"
        ));
    }
    let factor = keys.number("factor")?;
    let low = keys.number("low_freq_factor")?;
    let high = keys.number("high_freq_factor")?;
    let own = keys.size("original_max_position_embeddings")?;
    let original = original.or(own);
    let need = |value: Option<f64>, name: &str| match value {
        Some(value) => Ok(value as f32),
        None => Err(format!("rope_scaling lacks {name}")),
    };
    let longest = shape.max_position_embeddings;
    // Older Phi-3 files call LongRoPE su.
    let kind = new.or(old).map(|kind| match kind.as_str() {
        "su" => "longrope".to_owned(),
        _ => kind,
    });
    match kind.as_deref() {
        None if factor.is_some() => Err("rope_scaling lacks rope_type".into()),
        None | Some("default") => Ok(None),
        // Three positions of a token, which are the same in texts.
        Some("mrope") if factor.is_none() => Ok(None),
        Some("linear") => Ok(Some(RopeScaling::Linear(need(factor, "factor")?))),
        Some("dynamic") => {
            need(factor, "factor")?;
            // Hunyuan's scaling, for all positions. Its class does not read these keys.
            keys.ignore("beta_fast beta_slow mscale mscale_all_dim");
            let alpha = keys.number("alpha")?.filter(|&alpha| alpha != 0.);
            // Without it, only positions beyond max_position_embeddings change, which no sequence reaches here.
            Ok(alpha.map(|alpha| RopeScaling::Ntk(alpha as f32)))
        }
        Some("yarn") => {
            // The model's key, which transformers does not read here.
            keys.ignore("max_position_embeddings");
            yarn(keys, need(factor, "factor")?, original.unwrap_or(longest)).map(Some)
        }
        Some("longrope") => {
            let original = original.unwrap_or(longest);
            let (short, long) = (keys.numbers("short_factor")?, keys.numbers("long_factor")?);
            // Which of them does not depend on the sequence: a prefix must have the same K under all.
            let (factors, name) = if longest > original {
                (long, "long_factor")
            } else {
                (short, "short_factor")
            };
            let factors = factors.ok_or_else(|| format!("rope_scaling lacks {name}"))?;
            // Each layer has a copy before they are compared with its heads.
            if factors.len() > MAX_FACTORS {
                let count = factors.len();
                return Err(format!(
                    "{name} has {count} values, and only up to {MAX_FACTORS} are supported"
                ));
            }
            let stretch = factor.unwrap_or(longest as f64 / original as f64);
            let given = keys.number("attention_factor")?;
            let attention_factor = given.unwrap_or_else(|| {
                if stretch > 1. {
                    (1. + stretch.ln() / (original as f64).ln()).sqrt()
                } else {
                    1.
                }
            });
            Ok(Some(RopeScaling::Long(LongScaling {
                factors: LongFactors::Values(factors.into_iter().map(|f| f as f32).collect()),
                attention_factor: attention_factor as f32,
            })))
        }
        Some("proportional") => {
            let part = keys.number("partial_rotary_factor")?;
            Ok(Some(RopeScaling::Proportional(ProportionalScaling {
                part: part.unwrap_or(1.) as f32,
                factor: factor.unwrap_or(1.) as f32,
            })))
        }
        Some("llama3") => Ok(Some(RopeScaling::Llama3(Llama3Scaling {
            factor: need(factor, "factor")?,
            low_freq_factor: need(low, "low_freq_factor")?,
            high_freq_factor: need(high, "high_freq_factor")?,
            original_max_position_embeddings: original
                .ok_or("rope_scaling lacks original_max_position_embeddings")?,
        }))),
        Some(other) => Err(format!(
            "rope scaling '{other}' is not supported: only default, linear, dynamic, llama3, longrope, proportional and yarn are"
        )),
    }
}

fn yarn(keys: &mut Keys, factor: f32, original: usize) -> Result<RopeScaling, String> {
    let mscale = |by: f64| 1. + 0.1 * by * f64::from(factor.max(1.)).ln();
    let one = keys.number("mscale")?.filter(|&by| by != 0.);
    let all = keys.number("mscale_all_dim")?.filter(|&by| by != 0.);
    let by_default = match (one, all) {
        (Some(one), Some(all)) => mscale(one) / mscale(all),
        _ => mscale(1.),
    };
    let attention_factor = keys.number("attention_factor")?.unwrap_or(by_default);
    // vLLM's name of a further factor, which transformers does not read.
    let further = keys.number("attn_factor")?.unwrap_or(1.);
    Ok(RopeScaling::Yarn(YarnScaling {
        factor,
        original_max_position_embeddings: original,
        beta_fast: keys.number("beta_fast")?.unwrap_or(32.) as f32,
        beta_slow: keys.number("beta_slow")?.unwrap_or(1.) as f32,
        truncate: keys.flag("truncate")?.unwrap_or(true),
        attention_factor: (attention_factor * further) as f32,
        mscale_all_dim: all.unwrap_or(0.) as f32,
    }))
}

/// The scaling of queries by the `beta` that `key` says, with the context before `scaling`; if that is none of YaRN,
/// the error says what is `accepted`.
fn query_scaling(
    keys: &Keys,
    (key, beta): (&str, Option<f64>),
    scaling: Option<&RopeScaling>,
    accepted: &str,
) -> Result<Option<QueryScaling>, String> {
    match (beta, scaling) {
        (None, _) => Ok(None),
        (Some(beta), Some(RopeScaling::Yarn(yarn))) => Ok(Some(QueryScaling {
            beta: beta as f32,
            original_max_position_embeddings: yarn.original_max_position_embeddings,
        })),
        (Some(beta), _) => Err(keys.refused(key, &beta.into(), accepted)),
    }
}

/// The frequency scaling in GGUF metadata.
fn gguf_scaling(keys: &mut Keys, shape: &ModelShape) -> Result<Option<RopeScaling>, String> {
    if !keys.is_gguf() {
        return Ok(None);
    }
    let kind = keys.text("rope.scaling.type")?;
    let original = keys.size("rope.scaling.original_context_length")?;
    let original = original.filter(|&length| length > 0);
    let longest = shape.max_position_embeddings;
    if keys.has_rope_factors() {
        let is_long = original.is_some_and(|original| longest > original);
        let attention_factor = keys.number("rope.scaling.attn_factor")?;
        return Ok(Some(RopeScaling::Long(LongScaling {
            factors: LongFactors::Tensor(if is_long {
                "rope_factors_long.weight"
            } else {
                "rope_factors_short.weight"
            }),
            attention_factor: attention_factor.unwrap_or(1.) as f32,
        })));
    }
    let mut factor = || {
        let (key, keys) = ("rope.scaling.factor", &mut *keys);
        keys.float(key)?.ok_or_else(|| keys.missing(key))
    };
    match kind.as_deref() {
        None | Some("none") => Ok(None),
        Some("linear") => Ok(Some(RopeScaling::Linear(factor()?))),
        Some("yarn") => {
            let factor = factor()?;
            let mut number = |name: &str, by_default: f64| -> Result<f32, String> {
                let given = keys.number(&format!("rope.scaling.yarn_{name}"))?;
                Ok(given.unwrap_or(by_default) as f32)
            };
            let mscale = |by: f64| 1. + 0.1 * by * f64::from(factor.max(1.)).ln();
            // The factor of `mscale_all_dim`, beside an `mscale` of 1.
            let all = f64::from(number("log_multiplier", 0.)?);
            let attention_factor = number("attn_factor", mscale(1.) / mscale(all))?;
            Ok(Some(RopeScaling::Yarn(YarnScaling {
                factor,
                original_max_position_embeddings: original.unwrap_or(longest),
                beta_fast: number("beta_fast", 32.)?,
                beta_slow: number("beta_slow", 1.)?,
                truncate: true,
                attention_factor,
                mscale_all_dim: all as f32,
            })))
        }
        Some(other) => Err(keys.refused(
            "rope.scaling.type",
            &other.into(),
            "only none, linear, yarn and longrope with its factors are",
        )),
    }
}
