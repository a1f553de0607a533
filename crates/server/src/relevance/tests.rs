use super::*;

#[test]
fn a_probability_is_the_softmax_of_two_logits() {
    // Log-probabilities of logits 2 and 1 beside others.
    let score = probability(2.0 - 9.0, 1.0 - 9.0);
    let expected = 2_f64.exp() / (2_f64.exp() + 1_f64.exp());
    assert!((score - expected).abs() < 1e-12);
    assert!((probability(-0.5, -0.5) - 0.5).abs() < 1e-12);
    assert!(probability(f32::NEG_INFINITY, -0.1) < 1e-12);
    assert!((probability(-0.1, f32::NEG_INFINITY) - 1.0).abs() < 1e-12);
}

#[test]
fn templates_are_filled_once() {
    let texts = ["Find {query}", "{document}?", "a {query} é"];
    let filled = |template| filled(template, texts);
    assert_eq!(
        filled("Q: {query} D: {document}!"),
        "Q: {document}? D: a {query} é!"
    );
    assert_eq!(filled("{document}{query}{"), "a {query} é{document}?{");
    let prompt = filled(QWEN);
    let asked = "<Instruct>: Find {query}\n<Query>: {document}?\n<Document>: a {query} é<|im_end|>";
    assert!(prompt.contains(asked), "{prompt}");
}

#[test]
fn a_cosine_has_no_length() {
    assert!((cosine(&[3.0, 4.0], &[6.0, 8.0]) - 1.0).abs() < 1e-12);
    assert!(cosine(&[1.0, 0.0], &[0.0, 5.0]).abs() < 1e-12);
    assert!((cosine(&[1.0, 1.0], &[-2.0, -2.0]) + 1.0).abs() < 1e-12);
    assert!(cosine(&[0.0, 0.0], &[1.0, 0.0]).abs() < 1e-12);
}
