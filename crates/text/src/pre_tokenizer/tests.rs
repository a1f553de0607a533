use super::*;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

const SAMPLE: &str = "It'S HelloWorld 12345, x_1!\n\n  \tनी é 你好。";

fn words_of(name: &str, text: &str) -> Vec<String> {
    let mut words = PreTokenizedString::from(text);
    let named = named(name).expect(name);
    named.splitter.pre_tokenize(&mut words).expect("splits");
    let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
    let range = |(_, (start, end), _): (_, (usize, usize), _)| text[start..end].to_owned();
    words.into_iter().map(range).collect()
}

/// Names, and the words of [`SAMPLE`], which are those of another engine (the Python package `regex`) for the same patterns.
/// The digits of minicpm5 are cut out first, so all spaces before a number are one piece.
const WORDS: &str = r"
gpt-2: It|'|S| HelloWorld| 12345|,| x|_|1|!|\n\n  |\t|न|ी| é| 你好|。
smollm: It|'|S| HelloWorld| |1|2|3|4|5|,| x|_|1|!|\n\n  |\t|न|ी| é| 你好|。
llama-bpe: It|'S| HelloWorld| |123|45|,| x|_|1|!\n\n|  |\tन|ी| é| 你好|。
qwen2: It|'S| HelloWorld| |1|2|3|4|5|,| x|_|1|!\n\n|  |\tन|ी| é| 你好|。
minicpm5: It|'S| HelloWorld| |123|45|,| x|_|1|!\n\n|  |\tन|ी| é| 你好|。
qwen35: It|'S| HelloWorld| |1|2|3|4|5|,| x|_|1|!\n\n|  |\tनी| é| 你好|。
seed-coder: It|'S| HelloWorld| |1|2|3|4|5|,| x|_|1|!|\n\n|  |\tन|ी| é| 你好|。
bailingmoe: It|'S| HelloWorld| |1|2|3|4|5|,| x|_|1|!\n\n|  |\tन|ी| é| 你好|。
tekken: It|'S| Hello|World| |1|2|3|4|5|,| x|_|1|!\n\n|  |\tनी| é| 你好|。
gpt-4o: It'S| Hello|World| |123|45|,| x|_|1|!\n\n|  |\tनी| é| 你好|。
kimi-k2: It'S| Hello|World| |123|45|,| x|_|1|!\n\n|  |\tनी| é| |你好|。
deepseek-v3: It|'S| HelloWorld| |123|45|,| x|_|1|!\n\n|  |\tनी| é| |你好|。
deepseek-coder: It|'|S| HelloWorld| |1|2|3|4|5|,| x|_|1|!|\n|\n|  |\t|न|ी| é| |你好|。
deepseek-llm: It|'|S| HelloWorld| |1|2|3|4|5|,| x|_|1|!|\n|\n|  \t|नी| é| |你好|。
bloom: It'S| HelloWorld| 12345|,| x_1|!\n\n  \t|नी| é| 你好|。
viking: It'S| HelloWorld| |1|2|3|4|5|,| x_|1|!\n\n  \t|नी| é| 你好|。
";

#[test]
fn each_name_splits_as_its_models_do() {
    for row in WORDS.trim().lines() {
        let (name, words) = row.split_once(": ").expect("a name and its words");
        let expected = words.replace("\\n", "\n").replace("\\t", "\t");
        assert_eq!(words_of(name, SAMPLE).join("|"), expected, "{name}");
    }
    // Its digits are split off bytes, some of which are numbers to Unicode, too; no merge crosses those.
    let falcon = words_of("falcon", "It's 12 12345!?x");
    assert_eq!(falcon.join("|"), "It|'|s| |12| |123|45|!?|x");
    for (name, same) in [
        ("default", "gpt-2"),
        ("starcoder", "smollm"),
        ("command-r", "smollm"),
        ("dbrx", "llama-bpe"),
        ("glm4", "llama-bpe"),
        ("stablelm2", "qwen2"),
        ("llama4", "gpt-4o"),
        ("mellum2", "smollm"),
        ("f2llmv2", "qwen2"),
        ("hunyuan-dense", "deepseek-v3"),
    ] {
        assert_eq!(words_of(name, SAMPLE), words_of(same, SAMPLE), "{name}");
    }
}

#[test]
fn settings_go_with_names() {
    for (name, composed, as_llama3) in [
        ("qwen2", true, false),
        ("command-r", true, false),
        ("tekken", false, true),
        ("llama-bpe", false, true),
        ("dbrx", false, false),
    ] {
        let named = named(name).expect(name);
        assert_eq!(named.normalizer.is_some(), composed, "{name}");
        assert_eq!((named.ignore_merges, named.add_bos), (as_llama3, as_llama3));
    }
    let error = named("superbpe").err().expect("not supported").to_string();
    assert!(error.contains("`superbpe`"), "{error}");
}
