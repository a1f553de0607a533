//! Where to keep what speculation learns on this machine.

use super::plan::Plan;
use crate::engine::CostCache;
use crate::kernels;
use crate::model;
use crate::spec::BudgetMode;
use candle_core::Device;
use sysinfo::{CpuRefreshKind, RefreshKind, System};

/// The cache of the engine of this plan, in the user's folder for caches; `None` = nothing is kept.
pub fn of(plan: &Plan) -> Option<CostCache> {
    let engine = &plan.config.engine;
    let learns = engine.spec_budget == BudgetMode::Adaptive && !plan.drafts.is_empty();
    let folder = model::hub::cache_folder().filter(|_| learns && !engine.no_cost_cache)?;
    Some(CostCache {
        folder: folder.join("foretoken"),
        key: key(plan),
    })
}

/// All on which costs and acceptance depend, but for the load of the machine.
fn key(plan: &Plan) -> String {
    let (load, engine) = (&plan.config.load, &plan.config.engine);
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
        "foretoken {}; target {target:016x} {:?} {:?} {} {}; drafts {}; spec-topk {}; {}",
        env!("CARGO_PKG_VERSION"),
        load.dtype,
        load.quantize,
        load.enforce_eager,
        load.one_launch,
        drafts.join(", "),
        engine.spec.topk,
        machine(&plan.device)
    )
}

/// The machine, in words.
fn machine(device: &Device) -> String {
    let cpus = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
    let system = System::new_with_specifics(cpus);
    let cpu = system.cpus().first();
    let cpu = cpu.map_or("unknown CPU", |cpu| cpu.brand().trim());
    let threads = kernels::threads();
    match kernels::device_memory(device) {
        Ok(Some((_, bytes))) => format!("GPU with {bytes} bytes; {cpu}"),
        _ => format!("{cpu}, {threads} threads"),
    }
}
