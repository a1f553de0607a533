//! Makes a compiled template pay for what it does: instructions that can cost more than a constant are
//! replaced by calls of [`operators`](super::operators) or preceded by a payment.

use super::operators;
use crate::error::{Error, Result};
use minijinja::machinery::{Instruction, Instructions};

/// `ApplyFilter` without a place in the library's cache of filters.
const NOT_CACHED: u8 = !0;

fn call<'a>(operator: &'static str, args: u16) -> Instruction<'a> {
    Instruction::ApplyFilter(operator, Some(args), NOT_CACHED)
}

/// `program` with its payments.
///
/// # Errors
/// `Setup`, if it has an instruction that chat templates do not need and that we do not bound.
pub(super) fn guarded<'a>(program: &Instructions<'a>) -> Result<Instructions<'a>> {
    let old: Vec<&Instruction<'a>> = (0..).map_while(|at| program.get(at)).collect();
    let mut is_target = vec![false; old.len() + 1];
    for &instruction in &old {
        if let Some(&mut target) = target_mut(&mut instruction.clone())
            && let Some(mark) = is_target.get_mut(target as usize)
        {
            *mark = true;
        }
    }
    let mut new = Instructions::new(program.name(), program.source());
    let mut places = Vec::with_capacity(old.len() + 1);
    let mut length = 0;
    for (at, &instruction) in old.iter().enumerate() {
        // A constant came with the source, which is bounded, unless something jumps between the two.
        let constant = !is_target[at] && at > 0 && matches!(old[at - 1], Instruction::LoadConst(_));
        let line = program.get_line(at as u32);
        places.push(length);
        replace(instruction, constant, &mut |instruction| {
            length = 1 + match line {
                Some(line) => new.add_with_line(instruction, line as u16),
                None => new.add(instruction),
            };
        })?;
    }
    places.push(length);
    for at in 0..length {
        if let Some(target) = new.get_mut(at).and_then(target_mut) {
            *target = places.get(*target as usize).copied().unwrap_or(length);
        }
    }
    Ok(new)
}

/// Where `instruction` may jump to, or where the macro that it builds begins.
fn target_mut<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    use Instruction as I;
    match instruction {
        I::Iterate(target)
        | I::Jump(target)
        | I::JumpIfFalse(target)
        | I::JumpIfFalseOrPop(target)
        | I::JumpIfTrueOrPop(target)
        | I::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// Gives `emit` what runs instead of `instruction`. `constant`: the value on top of the stack is one of
/// the source.
fn replace<'a>(
    instruction: &Instruction<'a>,
    constant: bool,
    emit: &mut dyn FnMut(Instruction<'a>),
) -> Result<()> {
    use Instruction as I;
    let instead = match instruction {
        I::Add => Some(call(operators::ADD, 2)),
        I::StringConcat => Some(call(operators::CONCAT, 2)),
        I::Mul => Some(call(operators::MULTIPLY, 2)),
        I::Slice => Some(call(operators::SLICE, 4)),
        I::In => Some(call(operators::IN, 2)),
        I::GetItem if !constant => Some(call(operators::ITEM, 2)),
        // Written by the formatter, which counts.
        I::EmitRaw(text) => {
            emit(I::LoadConst((*text).into()));
            Some(I::Emit)
        }
        _ => None,
    };
    if let Some(instead) = instead {
        emit(instead);
        return Ok(());
    }
    match instruction {
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte if !constant => {
            emit(call(operators::COMPARED, 1));
        }
        // A loop that is called iterates, too.
        I::CallFunction(_, Some(1..)) | I::FastRecurse | I::PushLoop(_) => {
            emit(call(operators::ITERATED, 1));
        }
        // The value is below the namespace.
        I::SetAttr(_) => {
            emit(I::Swap);
            emit(call(operators::STORED, 1));
            emit(I::Swap);
        }
        _ => refuse_unbounded(instruction)?,
    }
    emit(instruction.clone());
    if let I::BuildList(_) | I::BuildTuple(_) | I::BuildMap(_) = instruction {
        emit(call(operators::BUILT, 1));
    }
    Ok(())
}

/// Refuses every instruction but those that are known to cost little, or to be paid for by filters,
/// tests, functions, methods and the formatter.
fn refuse_unbounded(instruction: &Instruction<'_>) -> Result<()> {
    use Instruction as I;
    let what = match instruction {
        I::CallMethod("changed", _) => "loop.changed",
        I::UnpackLists(_) | I::MergeKwargs(_) => "calls with * or **",
        I::PushAutoEscape | I::PopAutoEscape => "autoescape",
        I::CompareAndPreserve(_) => "chains of comparisons",
        I::StoreLocal(_)
        | I::Lookup(_)
        | I::GetAttr(_)
        | I::GetItem
        | I::LoadConst(_)
        | I::BuildMap(_)
        | I::BuildKwargs(_)
        | I::BuildList(_)
        | I::BuildTuple(_)
        | I::UnpackList(_)
        | I::Sub
        | I::Div
        | I::IntDiv
        | I::Rem
        | I::Pow
        | I::Neg
        | I::Not
        | I::Eq
        | I::Ne
        | I::Gt
        | I::Gte
        | I::Lt
        | I::Lte
        | I::ApplyFilter(..)
        | I::PerformTest(..)
        | I::Emit
        | I::PushWith
        | I::Iterate(_)
        | I::PushDidNotIterate
        | I::PopFrame
        | I::PopLoopFrame
        | I::Jump(_)
        | I::JumpIfFalse(_)
        | I::JumpIfFalseOrPop(_)
        | I::JumpIfTrueOrPop(_)
        | I::BeginCapture(_)
        | I::EndCapture
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_)
        | I::DupTop
        | I::DiscardTop
        | I::Swap
        | I::BuildMacro(..)
        | I::Return
        | I::IsUndefined
        | I::Enclose(_)
        | I::GetClosure => return Ok(()),
        _ => "other templates or blocks",
    };
    Err(Error::setup(format!(
        "the chat template uses {what}, which is not supported"
    )))
}
