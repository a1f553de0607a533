//! Where to keep what speculation learns on this machine.

use super::plan::Plan;
use crate::config::Config;
use crate::engine::CostCache;
use crate::kernels;
use crate::model::{self, LoadFormat};
use crate::sampling::mix;
use crate::spec::BudgetMode;
use candle_core::Device;
use sysinfo::{CpuRefreshKind, RefreshKind, System};

/// The cache of the engine of this plan, in the user's folder for caches; `None` = nothing is kept, as of dummy weights,
/// whose drafts say nothing.
pub fn of(plan: &Plan) -> Option<CostCache> {
    let engine = &plan.config.engine;
    let is_real = plan.config.load.load_format != LoadFormat::Dummy;
    let is_adaptive = engine.spec_budget == BudgetMode::Adaptive;
    let learns = is_real && is_adaptive && !plan.drafts.is_empty();
    let folder = model::hub::cache_folder().filter(|_| learns && !engine.no_cost_cache)?;
    Some(CostCache {
        folder: folder.join("foretoken"),
        key: key(plan),
    })
}

/// All on which costs and acceptance depend, but for the load of the machine.
fn key(plan: &Plan) -> String {
    let target = model::fingerprint(&plan.target.checkpoint.source, "");
    let drafts = plan.drafts.iter().map(|planned| {
        let source = planned
            .draft
            .as_ref()
            .and_then(|draft| draft.source.as_ref());
        let weights = source.map_or(0, |source| model::fingerprint(source, ""));
        let tables = if planned.with_tables {
            " and tables"
        } else {
            ""
        };
        format!("{} ({weights:016x}){tables}", planned.choice)
    });
    let drafts: Vec<String> = drafts.collect();
    format!(
        "foretoken {}; target {target:016x}; drafts {} of {}; {}; {}",
        env!("CARGO_PKG_VERSION"),
        drafts.join(", "),
        vocabulary(
            plan.draft_vocabulary
                .as_ref()
                .map(|vocabulary| &*vocabulary.ids)
        ),
        settings(&plan.config),
        machine(&plan.device)
    )
}

/// The ids that a draft may predict, as a hash.
fn vocabulary(ids: Option<&[u32]>) -> String {
    match ids {
        None => "all ids".into(),
        Some(ids) => {
            let hash = (ids.iter()).fold(0, |hash, &id| mix(hash ^ u64::from(id)));
            format!("{} ids ({hash:016x})", ids.len())
        }
    }
}

/// The flags on which costs and acceptance depend.
fn settings(config: &Config) -> String {
    let (load, engine) = (&config.load, &config.engine);
    format!(
        "dtype {:?}, kv-cache-dtype {:?}, quantize {:?}, draft-quantize {:?}, n-cpu-moe {}, GPUs {} {:?}, enforce-eager {}, one-launch {}, batch-invariant {}, acceptance {:?}, spec-topk {}",
        load.dtype,
        load.kv_cache_dtype,
        load.quantize,
        config.draft_quantize,
        load.host_expert_layers(),
        load.pipeline_parallel_size,
        load.tensor_split,
        load.enforce_eager,
        load.one_launch,
        load.batch_invariant,
        engine.acceptance,
        engine.spec.topk
    )
}

/// The machine, in words.
fn machine(device: &Device) -> String {
    let cpus = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
    let system = System::new_with_specifics(cpus);
    let cpu = system.cpus().first();
    let cpu = cpu.map_or("unknown CPU", |cpu| cpu.brand().trim());
    // Which `FORETOKEN_CPU_KERNELS` may choose.
    let isa = kernels::cpu::check();
    let threads = kernels::threads();
    match kernels::device_memory(device) {
        Ok(Some((_, bytes))) => format!("GPU with {bytes} bytes; {cpu}, {isa:?}"),
        _ => format!("{cpu}, {isa:?}, {threads} threads"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Command;

    fn settings_of(flags: &str) -> String {
        let line = format!("foretoken m --draft-model d {flags}");
        match Command::from_args(line.split_whitespace()) {
            Ok(Command::Serve(config)) => settings(&config),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn what_changes_costs_or_acceptance_changes_the_key() {
        let plain = settings_of("");
        for flags in [
            "--dtype bf16",
            "--kv-cache-dtype q8_0",
            "--quantize q8_0",
            "--draft-quantize q8_0",
            "--enforce-eager",
            "--batch-invariant",
            "--acceptance rejection",
            "--spec-topk 2",
        ] {
            assert_ne!(settings_of(flags), plain, "{flags}");
        }
        assert_eq!(settings_of("--port 1"), plain);
        let ids = [&[1, 2][..], &[1, 3][..], &[1, 2, 3][..]].map(|ids| vocabulary(Some(ids)));
        assert!(!ids.contains(&vocabulary(None)));
        for (number, one) in ids.iter().enumerate() {
            assert!(!ids[..number].contains(one), "{one}");
        }
    }
}
