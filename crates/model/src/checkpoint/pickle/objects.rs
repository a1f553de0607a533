//! The objects of a pickle that are needed for state dicts. Nothing of it is executed: a call is kept as a call.
//!
//! Objects refer to each other by number. So what a pickle shares is stored once, however often it is used, and no
//! object contains another: neither reading nor dropping recurses.
//!
//! The format: <https://github.com/python/cpython/blob/3.13/Lib/pickletools.py>. `torch.save` writes protocol 2.

use super::Outcome;
use std::collections::HashMap;

/// Maximum number of objects. A tensor has about 20.
const MAX_OBJECTS: usize = 1 << 18;
/// Maximum number of bytes of a whole number.
const MAX_INT_BYTES: usize = 8;

/// The number of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectId(u32);

#[derive(Debug)]
pub enum Object<'p> {
    /// None, a bool or a float: no tensor depends on them.
    Other,
    Int(i64),
    Text(&'p str),
    /// A class or a function: its module and its name.
    Global(&'p str, &'p str),
    /// A tuple or a list.
    Sequence(Vec<ObjectId>),
    /// Pairs of keys and values in the order in which they were set.
    Dict(Vec<(ObjectId, ObjectId)>),
    /// The object that is called, and its arguments.
    Call(ObjectId, ObjectId),
    /// The object that is stored beside the pickle under this description.
    Persistent(ObjectId),
}

/// All objects of a pickle.
#[derive(Debug)]
pub struct Objects<'p> {
    all: Vec<Object<'p>>,
    root: ObjectId,
}

impl<'p> Objects<'p> {
    /// Reads `pickle`.
    ///
    /// # Errors
    /// A message that says what is wrong or not supported.
    pub fn read(pickle: &'p [u8]) -> Outcome<Self> {
        let mut machine = Machine {
            rest: pickle,
            all: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        let root = loop {
            if let Some(root) = machine.step()? {
                break root;
            }
        };
        let all = machine.all;
        Ok(Self { all, root })
    }

    /// The object that the pickle is of.
    pub fn root(&self) -> &Object<'p> {
        self.get(self.root)
    }

    pub fn get(&self, id: ObjectId) -> &Object<'p> {
        &self.all[id.0 as usize]
    }
}

/// The machine that reads opcodes. Each opcode creates at most one object and needs at least one byte.
struct Machine<'p> {
    rest: &'p [u8],
    all: Vec<Object<'p>>,
    stack: Vec<ObjectId>,
    /// Heights of the stack from which on objects belong to a tuple, a list or a dict.
    marks: Vec<usize>,
    memo: HashMap<u32, ObjectId>,
}

impl<'p> Machine<'p> {
    /// Executes an opcode. The last one gives the root.
    fn step(&mut self) -> Outcome<Option<ObjectId>> {
        let [opcode] = self.bytes()?;
        match opcode {
            b'.' => return self.pop().map(Some),
            // The protocol's version.
            0x80 => drop(self.take(1)?),
            b'(' => self.marks.push(self.stack.len()),
            b'N' | 0x88 | 0x89 => self.push(Object::Other)?,
            b'G' => {
                self.take(8)?;
                self.push(Object::Other)?;
            }
            b'J' | b'K' | b'M' | 0x8a => self.int(opcode)?,
            b'X' => {
                let len = u32::from_le_bytes(self.bytes()?);
                let text = self.take(len as usize)?;
                self.push(Object::Text(utf8(text)?))?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Object::Global(module, name))?;
            }
            b'q' | b'r' | b'h' | b'j' => self.remember(opcode)?,
            b'}' => self.push(Object::Dict(Vec::new()))?,
            b'a' | b'e' | b's' | b'u' => self.extend(opcode)?,
            b']' | b')' | b't' | 0x85..=0x87 => {
                let items = match opcode {
                    b']' | b')' => Vec::new(),
                    b't' => self.pop_to_mark()?,
                    _ => self.pop_many(usize::from(opcode - 0x84))?,
                };
                self.push(Object::Sequence(items))?;
            }
            // REDUCE and NEWOBJ.
            b'R' | 0x81 => self.call()?,
            b'Q' => {
                let description = self.pop()?;
                self.push(Object::Persistent(description))?;
            }
            // BUILD sets attributes, of which tensors need none.
            b'b' => drop(self.pop()?),
            _ => {
                return Err(format!(
                    "its pickle has the opcode 0x{opcode:02x}, which no state dict needs"
                ));
            }
        }
        Ok(None)
    }

    fn int(&mut self, opcode: u8) -> Outcome<()> {
        let int = match opcode {
            b'J' => i32::from_le_bytes(self.bytes()?).into(),
            b'K' => u8::from_le_bytes(self.bytes()?).into(),
            b'M' => u16::from_le_bytes(self.bytes()?).into(),
            _ => {
                let [len] = self.bytes()?;
                let digits = self.take(len.into())?;
                if digits.len() > MAX_INT_BYTES {
                    return Err(format!("its pickle has a number of {len} bytes"));
                }
                let is_negative = digits.last().is_some_and(|&top| top >= 0x80);
                let mut bytes = [if is_negative { 0xff } else { 0 }; MAX_INT_BYTES];
                bytes[..digits.len()].copy_from_slice(digits);
                i64::from_le_bytes(bytes)
            }
        };
        self.push(Object::Int(int))
    }

    /// Memoizes the last object, or recalls one.
    fn remember(&mut self, opcode: u8) -> Outcome<()> {
        let key = match opcode {
            b'q' | b'h' => u8::from_le_bytes(self.bytes()?).into(),
            _ => u32::from_le_bytes(self.bytes()?),
        };
        if let b'q' | b'r' = opcode {
            let object = self.last()?;
            self.memo.insert(key, object);
        } else {
            let object = self.memo.get(&key).copied();
            self.stack.push(object.ok_or_else(wrong)?);
        }
        Ok(())
    }

    /// Adds one or all objects after the last mark to the list or the dict before them.
    fn extend(&mut self, opcode: u8) -> Outcome<()> {
        let items = match opcode {
            b'a' => self.pop_many(1)?,
            b's' => self.pop_many(2)?,
            _ => self.pop_to_mark()?,
        };
        let target = self.last()?;
        match (&mut self.all[target.0 as usize], opcode) {
            (Object::Sequence(list), b'a' | b'e') => list.extend(items),
            (Object::Dict(pairs), b's' | b'u') => {
                let (items, rest) = items.as_chunks();
                if !rest.is_empty() {
                    return Err(wrong());
                }
                pairs.extend(items.iter().map(|&[key, value]| (key, value)));
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// A call is kept as it is, except that of a dict's constructor: what follows sets its items.
    fn call(&mut self) -> Outcome<()> {
        let arguments = self.pop()?;
        let callee = self.pop()?;
        let get = |id: ObjectId| &self.all[id.0 as usize];
        // The argument of defaultdict makes what is missing.
        let most = match get(callee) {
            Object::Global("collections", "OrderedDict") => Some(0),
            Object::Global("collections", "defaultdict") => Some(1),
            _ => None,
        };
        let object = match (most, get(arguments)) {
            (None, _) => Object::Call(callee, arguments),
            (Some(most), Object::Sequence(given)) if given.len() <= most => {
                Object::Dict(Vec::new())
            }
            _ => return Err("its pickle has a dict of given items, which is not supported".into()),
        };
        self.push(object)
    }

    fn push(&mut self, object: Object<'p>) -> Outcome<()> {
        if self.all.len() == MAX_OBJECTS {
            return Err(format!("its pickle has more than {MAX_OBJECTS} objects"));
        }
        self.stack.push(ObjectId(self.all.len() as u32));
        self.all.push(object);
        Ok(())
    }

    /// The last object after the last mark.
    fn last(&self) -> Outcome<ObjectId> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack[floor..].last().copied().ok_or_else(wrong)
    }

    fn pop(&mut self) -> Outcome<ObjectId> {
        let last = self.last()?;
        self.stack.pop();
        Ok(last)
    }

    /// The last `count` objects, in order.
    fn pop_many(&mut self, count: usize) -> Outcome<Vec<ObjectId>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count);
        let start = start.filter(|&start| start >= floor).ok_or_else(wrong)?;
        Ok(self.stack.split_off(start))
    }

    /// The objects after the last mark, which ends.
    fn pop_to_mark(&mut self) -> Outcome<Vec<ObjectId>> {
        let mark = self.marks.pop().ok_or_else(wrong)?;
        Ok(self.stack.split_off(mark))
    }

    fn take(&mut self, len: usize) -> Outcome<&'p [u8]> {
        let taken = self.rest.split_at_checked(len);
        let (taken, rest) = taken.ok_or_else(|| "its pickle ends too early".to_owned())?;
        self.rest = rest;
        Ok(taken)
    }

    fn bytes<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    /// The text before the next line feed.
    fn line(&mut self) -> Outcome<&'p str> {
        let end = self.rest.iter().position(|&byte| byte == b'\n');
        let line = self.take(end.ok_or_else(wrong)?)?;
        self.take(1)?;
        utf8(line)
    }
}

fn utf8(bytes: &[u8]) -> Outcome<&str> {
    std::str::from_utf8(bytes).map_err(|e| format!("its pickle: {e}"))
}

fn wrong() -> String {
    "its pickle is invalid".to_owned()
}
