//! Drafts and their rules.

use super::*;

#[test]
fn speculation_is_on_unless_it_is_switched_off() {
    for flags in ["", "--speculative-decoding", "--drafter tables"] {
        let config = accepted(&format!("--model m {flags}"));
        assert_eq!(config.drafter, Some(DrafterChoice::Tables), "{flags}");
    }
    // Flags that choose no drafter may stay where they are.
    for flags in ["", "--spec-length 3 --spec-nodes 9 --tables-memory 1MiB"] {
        let config = accepted(&format!("--model m {OFF} {flags}"));
        assert_eq!((config.drafter, config.engine.spec.length), (None, 0));
    }
    let draft = ModelChoice {
        name: "d".into(),
        revision: None,
    };
    for flags in ["", "--speculative-decoding", "--drafter model"] {
        let config = accepted(&format!(
            "--model m --draft-model d --spec-length 3 {flags}"
        ));
        assert_eq!(
            config.drafter,
            Some(DrafterChoice::Model(draft.clone())),
            "{flags}"
        );
        assert_eq!(config.engine.spec.length, 3);
    }
    let head = |name: &str| {
        let flags = format!("--model m --draft-model d --drafter {name} --tables-memory 1MiB");
        accepted(&flags).drafter
    };
    assert_eq!(head("eagle3"), Some(DrafterChoice::Eagle3(draft.clone())));
    assert_eq!(head("parallel"), Some(DrafterChoice::Parallel(draft)));
    let layers = |flags: &str| accepted(&format!("--model m --drafter self {flags}")).drafter;
    assert_eq!(layers(""), Some(DrafterChoice::Own(None)));
    let some = "0-11,24-29".parse().ok();
    assert_eq!(
        layers("--draft-layers 0-11,24-29"),
        Some(DrafterChoice::Own(some))
    );
}

#[test]
fn bad_speculation_is_refused_with_a_remedy() {
    for drafter in ["model", "eagle3", "parallel"] {
        let flags = format!("--model m --drafter {drafter}");
        refused_with(&flags, "add --draft-model MODEL");
    }
    for layers in ["", "9-3", "3,3", "x"] {
        refused_with(
            &format!("--model m --drafter self --draft-layers={layers}"),
            "ascending order, as in 0-11,24-29",
        );
    }
    for drafter in ["tables", "ngram", "lookahead", "self"] {
        refused_with(
            &format!("--model m --drafter {drafter} --draft-model d"),
            &format!("leave out --draft-model or --drafter {drafter}"),
        );
    }
    all_refused("--model m", REMEDIES);
}

/// Flags, and what is said of them.
const REMEDIES: &str = "
--speculative-decoding=false --draft-model d | leave out --draft-model
--speculative-decoding=false --drafter ngram | leave out --drafter
--spec-length 0 | set --speculative-decoding=false
--draft-revision r | --draft-revision needs --draft-model
--draft-quantize q4_k | --draft-quantize needs --draft-model
--drafter lookahead --spec-topk 1 | add --spec-topk 4
--draft-layers 0-3 | choose --drafter self
--prompt-lookup-min 3 | choose --drafter ngram
--drafter ngram --tables-memory 1MiB | choose --drafter tables
--drafter ngram --tables-corpus f | no effect with --drafter ngram
--tables-memory 0 | at least 1 byte
";

#[test]
fn a_draft_vocabulary_is_a_file_or_a_number() {
    let of = |flags: &str| accepted(&format!("--model m {flags}")).draft_vocab;
    assert_eq!(of("--draft-model d"), None);
    let file = Some(DraftVocab::File("ids.json".into()));
    assert_eq!(of("--draft-model d --draft-vocab ids.json"), file);
    assert_eq!(of("--drafter mtp --draft-vocab ids.json"), file);
    let counted = "--draft-model d --draft-vocab 32768 --tables-corpus c.txt";
    assert_eq!(of(counted), Some(DraftVocab::MostFrequent(32768)));
    let wrong = "
--draft-vocab f | needs --draft-model or --drafter mtp
--drafter self --draft-vocab f | needs --draft-model
--draft-model d --draft-vocab 5 | add --tables-corpus FILE
--draft-model d --draft-vocab 0 | at least 1
--draft-model d --draft-vocab f --learn l | leave out --learn or --draft-vocab
";
    all_refused("--model m", wrong);
}

#[test]
fn lookahead_needs_trees() {
    let config = accepted("--model m --drafter lookahead --spec-topk 4");
    assert_eq!(config.drafter, Some(DrafterChoice::Lookahead));
}

#[test]
fn nodes_siblings_and_rules_are_bounded() {
    let engine = accepted("--model m").engine;
    let topk = if crate::kernels::HAS_CUDA { 4 } else { 1 };
    assert_eq!((engine.spec.nodes, engine.spec.topk), (15, topk));
    assert_eq!(engine.acceptance, Acceptance::Coupled);
    assert_eq!(engine.spec_budget, BudgetMode::Adaptive);
    let line = "--model m --spec-nodes 64 --spec-topk 1 --acceptance rejection --spec-budget fixed";
    let engine = accepted(line).engine;
    assert_eq!((engine.spec.nodes, engine.spec.topk), (64, 1));
    assert_eq!(engine.acceptance, Acceptance::Rejection);
    assert_eq!(engine.spec_budget, BudgetMode::Fixed);
    let spec = |line| accepted(line).engine.spec;
    assert_eq!(
        spec("--model m --spec-length 16 --spec-nodes 16").length,
        16
    );
    // The default is no wish.
    assert_eq!(spec("--model m --spec-nodes 3").length, 8);
    let wrong = "
--spec-nodes 0 | between 1 and 64
--spec-nodes 65 | between 1 and 64
--spec-topk 0 | between 1 and 64
--spec-length 16 | --spec-length 16 is more than the 15 tokens of a draft: lower it, or raise --spec-nodes
--spec-length 4 --spec-nodes 3 | more than the 3 tokens
--acceptance typical | coupled, rejection
--spec-budget none | adaptive, fixed
";
    all_refused("--model m", wrong);
}

#[test]
fn lookup_bounds() {
    for (flags, min, max) in [
        ("--prompt-lookup-min 6", 6, 6),
        ("--prompt-lookup-max 1", 1, 1),
        ("--prompt-lookup-min 1 --prompt-lookup-max 3", 1, 3),
    ] {
        let config = accepted(&format!("--model m --drafter ngram {flags}"));
        assert_eq!(config.drafter, Some(DrafterChoice::Ngram { min, max }));
    }
    let wrong = "
--prompt-lookup-min 0 | --prompt-lookup-min
--prompt-lookup-max 0 | --prompt-lookup-max
--prompt-lookup-min 3 --prompt-lookup-max 2 | --prompt-lookup-min must be at most
";
    all_refused("--model m --drafter ngram", wrong);
}
