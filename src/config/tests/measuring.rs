//! `bench`, and `generate` over files.

use super::*;

#[test]
fn bench_needs_no_flag() {
    let Command::Bench(config, bench) = command("bench m --api-key=k") else {
        panic!("expected `bench`");
    };
    assert_eq!((bench.prompts, bench.random_prompts), (None, None));
    assert_eq!(bench.flags, ["m", "--api-key=k"]);
    assert!(config.engine.no_prefix_caching && config.engine.no_cost_cache);
    assert!(config.compared.is_empty());
    refused_with(
        "bench m --csv f --streams 2",
        "--csv has a line for each prompt",
    );
    for files in [
        "--json f --csv f",
        "--prompts f --json f",
        "--prompts p --warm f --csv f",
    ] {
        refused_with(&format!("bench m {files}"), "give each one of its own");
    }
    command("bench m --prompts p --warm p --json f --csv g");
}

/// `--drafters` takes the names of `--drafter`, and a few more.
#[test]
fn names_of_drafters_are_those_of_one() {
    let choices = |line: &str| {
        let Command::Bench(config, bench) = command(line) else {
            panic!("expected `bench`");
        };
        assert_eq!(bench.drafters.len(), config.compared.len());
        let all = config.compared.into_iter();
        all.map(|one| (one.choice, one.is_open)).collect::<Vec<_>>()
    };
    let head = || ModelChoice {
        name: "o/h".into(),
        revision: None,
    };
    let line = "bench m --draft-model o/h --drafters eagle3,parallel,model,head,auto,none,self,mtp";
    let ngram = DrafterChoice::Ngram { min: 2, max: 4 };
    let wanted = [
        (DrafterChoice::Eagle3(head()), false),
        (DrafterChoice::Parallel(head()), false),
        (DrafterChoice::Model(head()), false),
        (DrafterChoice::Model(head()), false),
        (DrafterChoice::Model(head()), false),
        (ngram.clone(), false),
        (DrafterChoice::Own(None), false),
        (DrafterChoice::Mtp, false),
    ];
    assert_eq!(choices(line), wanted);
    // Without flags, the target's checkpoint decides.
    assert_eq!(
        choices("bench m --drafters auto,ngram,lookahead,tables --spec-topk 4"),
        [
            (DrafterChoice::Tables, true),
            (ngram, false),
            (DrafterChoice::Lookahead, false),
            (DrafterChoice::Tables, false)
        ]
    );
    for name in ["eagle3", "parallel"] {
        refused_with(
            &format!("bench m --drafters {name}"),
            "needs a model: add --draft-model",
        );
    }
}

#[test]
fn bench_takes_several_lengths_and_acceptances() {
    let line = "bench --model m --random-prompts 1 --spec-length 6 --spec-lengths 1,6 --synthetic-acceptance 0,0.8,1";
    let Command::Bench(_, bench) = command(line) else {
        panic!("expected `bench`");
    };
    assert_eq!(bench.spec_lengths, [1, 6]);
    assert_eq!(bench.synthetic_acceptance, [0.0, 0.8, 1.0]);
    let wrong = "
--spec-lengths 0 | between 1 and --spec-length, which is 8: one is 0
--spec-length 3 --spec-lengths 2,4 | which is 3: one is 4
--spec-lengths= | --spec-lengths
--spec-lengths 1,x | --spec-lengths
--synthetic-acceptance 0.5,1.5 | '1.5' for '--synthetic-acceptance <A,A>': must be a number between 0 and 1
--synthetic-acceptance=-0.1 | between 0 and 1
--synthetic-acceptance nan | between 0 and 1
--synthetic-acceptance= | --synthetic-acceptance
";
    all_refused("bench --model m --random-prompts 1", wrong);
    refused_with(
        "--model m --synthetic-acceptance 0.5",
        "--synthetic-acceptance",
    );
}

/// As vLLM's users call it.
#[test]
fn a_batch_has_two_files_and_no_prompts() {
    for line in [
        "run-batch --model m -i a -o b",
        "generate --model m --input-file a --output-file b",
        "generate m --input-file a --out b",
    ] {
        match command(line) {
            Command::Generate(config, options) => {
                assert_eq!(config.model.name, "m");
                assert_eq!(options.input_file.as_deref(), Some(Path::new("a")));
                assert_eq!((options.prompts, options.out.to_str()), (None, Some("b")));
            }
            other => panic!("{other:?}"),
        }
    }
    refused_with("generate --model m -o b", "--prompts");
    refused_with("generate --model m -i a", "--out");
    for flag in [
        "--prompts p",
        "--samples 2",
        "--temperature 0",
        "--top-p 1",
        "--max-tokens 9",
    ] {
        let name = flag.split(' ').next().unwrap();
        refused_with(&format!("generate --model m -i a -o b {flag}"), name);
    }
}

#[test]
fn absurd_numbers_of_measurements_are_refused() {
    let counts = "--prompt-tokens --max-tokens --streams --spec-topks --repeat";
    let bench = "bench --model m --random-prompts 1";
    numbers_refused(bench, counts, &ABSURD);
    numbers_refused("bench --model m", "--random-prompts", &ABSURD);
    // 0 is greedy, and a rate.
    let rates = "--temperatures --synthetic-acceptance";
    numbers_refused(bench, rates, &ABSURD[1..]);
    numbers_refused(bench, "--spec-lengths", &ABSURD);
    let generate = "generate --model m --prompts p --out o";
    for first in [bench, generate] {
        let never = ["0", "-1", "nan", "1e300", BEYOND_U64];
        numbers_refused(first, "--limit-per-category", &never);
    }
    numbers_refused(generate, "--samples --max-tokens --top-p", &ABSURD);
    numbers_refused(generate, "--temperature", &ABSURD[1..]);
}
