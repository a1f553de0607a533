//! Compares each instruction set with f64, and with itself under other divisions into calls.

mod case;

use super::vectors::CHUNK;
use super::*;
use crate::span::Span;
use case::{BLOCK_SIZE, Case, Form, Sample, forms};
use half::{bf16, f16};

fn bits(out: Vec<f32>) -> Vec<u32> {
    out.into_iter().map(f32::to_bits).collect()
}

/// Heads that are not whole blocks are left out.
fn check_in_form<E: Sample>(
    (keys, rows, group, head_dim): (usize, usize, usize, usize),
    form: &Form,
    isa: Isa,
) {
    if E::elements(head_dim).is_some() {
        let case = Case::<E>::new(keys, rows, group, head_dim);
        case.with(form.clone()).check(isa);
    }
}

#[test]
fn each_isa_agrees_with_f64() {
    let mut salt = 0;
    for head_dim in [1, 13, 24, 40, 64, 80, 96, 128, 256] {
        for group in [1, 2, 3, 4, 8] {
            salt += 1;
            // Varied pairs of rows and keys, chunk borders among them.
            let rows = [1, 2, 3, 5, 7, 16, 50][salt % 7];
            let keys = [0, 1, 30, CHUNK - 2, CHUNK, 2 * CHUNK - 3, 300][salt * 5 % 7] + rows;
            for isa in Isa::available() {
                check_in_form::<f32>((keys, rows, group, head_dim), &Form::default(), isa);
                check_in_form::<f16>((keys, rows, group, head_dim), &Form::default(), isa);
                check_in_form::<bf16>((keys, rows, group, head_dim), &Form::default(), isa);
                check_in_form::<u8>((keys, rows, group, head_dim), &Form::default(), isa);
            }
        }
    }
}

#[test]
fn each_isa_agrees_with_f64_in_every_form() {
    for (i, form) in forms().iter().enumerate() {
        for (group, head_dim) in [(1, 64), (3, 40), (8, 13)] {
            let rows = [1, 3, 16, 50][(i + group) % 4];
            for keys in [rows, CHUNK, CHUNK + 40, 3 * CHUNK + 7] {
                let keys = keys.max(rows);
                for isa in Isa::available() {
                    check_in_form::<f32>((keys, rows, group, head_dim), form, isa);
                    check_in_form::<f16>((keys, rows, group, head_dim), form, isa);
                    check_in_form::<bf16>((keys, rows, group, head_dim), form, isa);
                    check_in_form::<u8>((keys, rows, group, head_dim), form, isa);
                }
            }
        }
    }
}

fn same_bits_for_any_division<E: Sample>() {
    // The last are those of latent attention.
    let shapes = [
        (1, 64),
        (3, 64),
        (4, 40),
        (8, 13),
        (2, 128),
        (1, 256),
        (4, 576),
    ];
    let plain = shapes.map(|shape| (shape, Form::default()));
    let others = forms().into_iter().zip([40, 64].into_iter().cycle());
    let others = others.map(|(form, head_dim)| ((3, head_dim), form));
    let fits = |(shape, _): &((usize, usize), Form)| E::elements(shape.1).is_some();
    for ((group, head_dim), form) in plain.into_iter().chain(others).filter(fits) {
        for keys in [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17] {
            let case = Case::<E>::new(keys, 19, group, head_dim).with(form.clone());
            for isa in Isa::available() {
                let like = Case::<E>::first_like(isa);
                let all_rows = bits(case.run(like, 1, 0..19, None));
                assert_eq!(bits(case.run(isa, 1, 0..19, None)), all_rows, "{isa:?}");
                for threads in [2, 16] {
                    assert_eq!(bits(case.run(isa, threads, 0..19, None)), all_rows);
                }
                for threads in [1, 2] {
                    assert_eq!(bits(case.run_apart(isa, threads, 0..19)), all_rows);
                }
                let chain: Vec<u64> = (0..19).map(|row| (2 << row) - 1).collect();
                for threads in [1, 16] {
                    assert_eq!(bits(case.run(isa, threads, 0..19, Some(&chain))), all_rows);
                }
                for rows in [0..1, 18..19, 3..5, 7..10, 1..18] {
                    let want =
                        &all_rows[rows.start * case.row_floats()..rows.end * case.row_floats()];
                    let got = bits(case.run(isa, 2, rows.clone(), None));
                    assert_eq!(got, want, "{rows:?}, {form:?}");
                }
            }
        }
    }
}

#[test]
fn threads_chunks_and_masks_do_not_change_a_bit() {
    same_bits_for_any_division::<f32>();
    same_bits_for_any_division::<f16>();
    same_bits_for_any_division::<bf16>();
    same_bits_for_any_division::<u8>();
}

/// A prompt in long chunks, in short ones and row by row, also where an item has more rows than a chunk has
/// keys.
#[test]
fn a_prompt_has_the_same_bits_however_it_is_divided() {
    same_bits_of_a_prompt::<f16>();
    same_bits_of_a_prompt::<bf16>();
    same_bits_of_a_prompt::<u8>();
}

fn same_bits_of_a_prompt<E: Sample>() {
    let window = Form {
        window: Some(70),
        ..Form::default()
    };
    for (group, head_dim, form) in [
        (1, 64, Form::default()),
        (3, 64, window),
        (1, 40, Form::default()),
    ]
    .into_iter()
    .filter(|shape| E::elements(shape.1).is_some())
    {
        let rows = 2 * CHUNK + 45;
        let case = Case::<E>::new(rows + 11, rows, group, head_dim).with(form);
        let plain = Isa::available().rfind(|&isa| Case::<E>::first_like(isa) != isa);
        for isa in Isa::available() {
            let like = match Case::<E>::first_like(isa) {
                Isa::Portable => plain.unwrap_or(Isa::Portable),
                other => other,
            };
            let want = bits(case.run(like, 2, 0..rows, None));
            for pieces in [1, 2, 7, 64, 200, rows] {
                let mut got = Vec::new();
                for start in (0..rows).step_by(pieces) {
                    // Row by row only some: it takes long.
                    let end = rows.min(start + pieces);
                    if pieces > 2 || start % 16 == 0 {
                        got.extend(bits(case.run(isa, 1 + pieces % 3, start..end, None)));
                    } else {
                        got.extend(&want[start * case.row_floats()..end * case.row_floats()]);
                    }
                }
                assert!(
                    got == want,
                    "{isa:?}, {pieces} rows at a time, {:?}",
                    case.form
                );
            }
        }
    }
}

/// A branching tree whose rows see different numbers of private keys: each row has the bits of the same path
/// as a chain, on every instruction set.
#[test]
fn a_row_of_a_tree_has_the_bits_of_its_path() {
    same_bits_of_a_path::<f16>();
    same_bits_of_a_path::<bf16>();
    same_bits_of_a_path::<u8>();
}

fn same_bits_of_a_path<E: Sample>() {
    let rows = 24;
    let parent = |row: usize| (row - 1) / 2;
    let mut masks = vec![1u64];
    for row in 1..rows {
        masks.push(masks[parent(row)] | 1 << row);
    }
    for (len, group, head_dim) in [
        (30, 3, 64),
        (CHUNK + 22, 3, 64),
        (CHUNK + 23, 3, 64),
        (CHUNK + 25, 2, 40),
        (CHUNK + 40, 8, 40),
        (300, 1, 128),
    ]
    .into_iter()
    .filter(|shape| E::elements(shape.2).is_some())
    {
        for form in forms().into_iter().chain([Form::default()]) {
            let case = Case::<E>::new(len, rows, group, head_dim).with(form);
            for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 16)]) {
                let like = Case::<E>::first_like(isa);
                let want = bits(case.run(like, 1, 0..rows, Some(&masks)));
                assert!(bits(case.run(isa, threads, 0..rows, Some(&masks))) == want);
                // The first rows alone, few of which read keys and values without a copy.
                for rows in 1..4 {
                    let few = bits(case.run(isa, threads, 0..rows, Some(&masks[..rows])));
                    assert!(few == want[..rows * case.row_floats()], "{rows} rows");
                }
                // Rows of the first path alone: 0, 1, 3, 7, 15. Row 1 is the second of a chain of two.
                let chain = bits(case.run(isa, threads, 0..2, None));
                assert!(
                    chain == want[..2 * case.row_floats()],
                    "{isa:?}, {:?}",
                    case.form
                );
            }
        }
    }
}

/// The rows of a block see one another, before and after them, also across the border of a chunk.
#[test]
fn rows_see_later_rows() {
    see_later_rows::<f16>();
    see_later_rows::<bf16>();
    see_later_rows::<u8>();
}

fn see_later_rows<E: Sample>() {
    for (len, rows, group) in [
        (9, 9, 1),
        (40, 16, 3),
        (CHUNK + 5, 16, 3),
        (CHUNK + 60, 64, 8),
        (CHUNK - 1, 64, 2),
    ] {
        let masks = vec![u64::MAX >> (64 - rows); rows];
        for (isa, window) in Isa::available().flat_map(|isa| [(isa, None), (isa, Some(7))]) {
            let form = Form {
                window,
                ..Form::default()
            };
            let case = Case::<E>::new(len, rows, group, 64).with(form);
            let one = case.run(isa, 1, 0..rows, Some(&masks));
            assert_eq!(one, case.run(isa, 16, 0..rows, Some(&masks)));
            let heads = case.dims.heads;
            for (i, got) in one.chunks(64).enumerate() {
                // A window ends at the row's own position, and hides nothing after it.
                let position = len - rows + i / heads;
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let want = case.reference_of(first..len, i / heads, i % heads);
                let off = got
                    .iter()
                    .zip(want)
                    .map(|(got, want)| f64::from(*got) - want);
                let worst = off.fold(0f64, |worst, off| worst.max(off.abs()));
                assert!(
                    worst < case.limit(isa),
                    "{isa:?}, {rows} rows of {len}: {worst}"
                );
            }
        }
    }
}

/// Rows of a whole text that see those after them, within a window on either side or all.
#[test]
fn rows_see_a_whole_text() {
    see_a_whole_text::<f32>();
    see_a_whole_text::<f16>();
    see_a_whole_text::<bf16>();
    see_a_whole_text::<u8>();
}

fn see_a_whole_text<E: Sample>() {
    for (len, group, window) in [
        (1, 1, None),
        (9, 3, None),
        (CHUNK + 70, 3, None),
        (CHUNK + 70, 1, Some(7)),
        (2 * CHUNK + 5, 1, Some(CHUNK + 9)),
        (2 * CHUNK, 8, Some(1)),
    ] {
        let form = Form {
            window,
            bidirectional: true,
            ..Form::default()
        };
        let case = Case::<E>::new(len, len, group, 64).with(form);
        for isa in Isa::available() {
            case.check(isa);
            let one = bits(case.run(isa, 1, 0..len, None));
            assert_eq!(bits(case.run(isa, 16, 0..len, None)), one, "{isa:?}");
        }
    }
}

/// What a row does not see changes nothing, whatever it is: the next token's value may be infinite.
#[test]
fn hidden_values_do_not_matter() {
    ignore_hidden_values::<f32>();
    ignore_hidden_values::<f16>();
    ignore_hidden_values::<bf16>();
    ignore_hidden_values::<u8>();
}

fn ignore_hidden_values<E: Sample>() {
    for (len, rows, window) in [
        (20, 4, None),
        (21, 4, None),
        (41, 8, Some(4)),
        (40, 8, Some(5)),
    ] {
        let form = Form {
            window,
            ..Form::default()
        };
        let case = || Case::<E>::new(len, rows, 3, 64).with(form.clone());
        let mut broken = case();
        let slot = |position: usize| {
            broken.blocks[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE
        };
        let (heads, head) = (broken.dims.kv_heads, E::narrow(&[f32::INFINITY; 64]));
        let infinite = head.repeat(heads);
        // The last token, and one before the window of the last row but one.
        let hidden = window.map(|window| len - 2 - window);
        for slot in [Some(len - 1), hidden]
            .into_iter()
            .flatten()
            .map(slot)
            .collect::<Vec<_>>()
        {
            broken.v[slot * infinite.len()..][..infinite.len()].copy_from_slice(&infinite);
        }
        let row = (rows - 2) * broken.row_floats()..(rows - 1) * broken.row_floats();
        for isa in Isa::available() {
            let want = bits(case().run(isa, 1, 0..rows, None));
            let got = bits(broken.run(isa, 1, 0..rows, None));
            assert_eq!(got[row.clone()], want[row.clone()], "{isa:?}, {len} keys");
        }
    }
}

/// With scores far apart, all but a few weights vanish, in the first or the last chunk.
#[test]
fn large_scores_stay_finite() {
    for isa in Isa::available() {
        let mut case = Case::<f32>::new(3 * CHUNK, 4, 3, 64);
        for q in &mut case.q {
            *q *= 100.0;
        }
        let got = case.run(isa, 2, 0..4, None);
        for (i, got) in got.chunks(64).enumerate() {
            let want = case.reference(i / 6, i % 6);
            assert!(
                got.iter()
                    .zip(want)
                    .all(|(got, want)| (f64::from(*got) - want).abs() < 1e-3)
            );
        }
    }
}

/// As they are where queries, keys and values have one product.
#[test]
fn rows_of_queries_may_be_parts_of_longer_ones() {
    let cpu = candle_core::Device::Cpu;
    let tensor = |dims: (usize, usize, usize)| Tensor::randn(0f32, 1., dims, &cpu).unwrap();
    let (all, k, v) = (tensor((6, 7, 16)), tensor((8, 2, 16)), tensor((8, 2, 16)));
    let spans = [Span::causal(0..6, 2, &[0])];
    let run = |q: &Tensor| {
        let batch = AttentionBatch::new(&spans, 8, 8).unwrap();
        let out = paged_attention(q, &k, &v, &batch, AttentionParams::scaled(0.3))?;
        out.flatten_all()?.to_vec1::<f32>()
    };
    let part = all.narrow(1, 1, 4).unwrap();
    let alone = run(&part.contiguous().unwrap()).unwrap();
    assert_eq!(run(&part).unwrap(), alone);
    // Not the rows themselves.
    run(&all.narrow(2, 0, 8).unwrap()).unwrap_err();
    let turned = tensor((4, 6, 16)).transpose(0, 1).unwrap();
    run(&turned).unwrap_err();
}
