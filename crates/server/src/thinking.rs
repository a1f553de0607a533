//! How much the model is to think: the fields that say it, and what becomes of them.

use super::choice_rules::MessageRules;
use super::context::Context;
use super::wire::{ChatFields, ThinkingField, ThinkingKind, wrong};
use foretoken_core::error::Result;
use foretoken_core::sampling::ThoughtLimit;
use foretoken_text::HarmonyParser;
use serde_json::{Map, Value};
use std::sync::Arc;

/// vLLM's field; -1 is no limit.
const BUDGET: &str = "thinking_token_budget";
/// The effort that asks for an answer without a thought.
const NO_EFFORT: &str = "none";
/// The variables with which chat templates switch thoughts on and off; most know the first.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// What a request says of how much the model is to think.
#[derive(Debug, Default)]
pub(super) struct ThinkingFields {
    /// `chat_template_kwargs`.
    pub variables: Option<Map<String, Value>>,
    /// `reasoning_effort`.
    pub effort: Option<String>,
    pub enable_thinking: Option<bool>,
    pub thinking: Option<ThinkingField>,
    /// `thinking_token_budget`.
    pub token_budget: Option<i64>,
    /// `thinking_budget`.
    pub budget: Option<usize>,
}

/// How much the model is to think.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ThinkingPlan {
    /// The variables of the chat template.
    pub variables: Option<Map<String, Value>>,
    /// Maximum number of tokens of the thought.
    pub max_tokens: Option<usize>,
    /// Whether the limit is for a thought that the prompt has opened alone.
    only_open: bool,
    /// Whether the request names the limit, which must then be kept.
    is_named: bool,
    /// What the client is told of what is left out.
    pub warning: Option<String>,
}

/// The warning where a request asks for thoughts and the model marks none. Clients ask every model for them.
const NO_THOUGHTS: &str = "thinking: thoughts are not available here and were left out; if the model writes them, start the server with --reasoning-parser";

impl ThinkingFields {
    /// Takes what a chat says of it.
    pub fn of_chat(chat: &mut ChatFields) -> Self {
        Self {
            variables: chat.chat_template_kwargs.take(),
            effort: chat.reasoning_effort.take(),
            enable_thinking: chat.enable_thinking,
            thinking: chat.thinking.take(),
            token_budget: chat.thinking_token_budget,
            budget: chat.thinking_budget,
        }
    }

    /// Whether a variable of the template says that the model thinks, or that it does not.
    fn of_variables(&self) -> Option<bool> {
        let variables = self.variables.as_ref()?;
        let value = |key: &&str| variables.get(*key)?.as_bool();
        SWITCHES.iter().find_map(value)
    }
}

impl Context<'_> {
    /// Decides how much the model is to think. Of several fields that switch thinking on or off, the first counts:
    /// the template's variables, `enable_thinking`, `thinking`, an effort `none`, a budget of 0.
    ///
    /// # Errors
    /// `Invalid`, naming the field, if a limit cannot be kept.
    pub(super) fn thinking(&self, asked: ThinkingFields) -> Result<ThinkingPlan> {
        let of_variables = asked.of_variables();
        let of_thinking = match asked.thinking.as_ref().map(|thinking| thinking.kind) {
            None => None,
            Some(ThinkingKind::Disabled) => Some(false),
            // How much the model thinks is left to it.
            Some(ThinkingKind::Adaptive | ThinkingKind::Enabled) => {
                self.reasoning_format.map(|_| true)
            }
        };
        let kind = asked.thinking.as_ref().map(|thinking| thinking.kind);
        let is_left_out = kind == Some(ThinkingKind::Enabled) && self.reasoning_format.is_none();
        let budget = self.thinking_budget(&asked)?;
        let is_named = asked.token_budget.is_some_and(|max| max >= 0);
        let has_no_effort = asked.effort.as_deref() == Some(NO_EFFORT);
        let is_zero = budget.unwrap_or(self.reasoning_budget) == Some(0);
        let switch = of_variables
            .or(asked.enable_thinking)
            .or(of_thinking)
            .or(has_no_effort.then_some(false))
            .or(is_zero.then_some(false));
        let default = self.reasoning_budget;
        // A default of no thought is for requests that do not ask for one.
        let default = default.filter(|&max| max > 0 || switch != Some(true));
        let mut variables = asked.variables;
        if let (Some(switch), None) = (switch, of_variables) {
            for name in SWITCHES {
                set(&mut variables, name, switch);
            }
        }
        if let Some(effort) = asked.effort {
            set(&mut variables, "reasoning_effort", effort);
        }
        Ok(ThinkingPlan {
            variables,
            max_tokens: if switch == Some(false) {
                Some(0)
            } else {
                budget.unwrap_or(default)
            },
            only_open: of_variables == Some(false),
            is_named,
            warning: is_left_out.then(|| NO_THOUGHTS.to_owned()),
        })
    }

    /// The budget that a request names; `Some(None)` = no limit.
    fn thinking_budget(&self, asked: &ThinkingFields) -> Result<Option<Option<usize>>> {
        let named = asked.thinking.as_ref();
        let named = named.filter(|thinking| thinking.has_budget());
        if named.is_some_and(|thinking| thinking.kind == ThinkingKind::Disabled) {
            return wrong(
                "thinking.budget_tokens",
                "requires the type enabled: leave it out",
            );
        }
        let given = [
            (BUDGET, asked.token_budget.is_some()),
            ("thinking.budget_tokens", named.is_some()),
            ("thinking_budget", asked.budget.is_some()),
        ];
        let mut given = given.into_iter().filter(|(_, is_given)| *is_given);
        if let (Some((first, _)), Some((other, _))) = (given.next(), given.next()) {
            let what = format!("and {other} exclude each other: leave one out");
            return wrong(first, what);
        }
        let budget = match asked.token_budget {
            // Where no mark closes a thought, the budgets of other APIs are hints.
            None if self.thoughts.is_none() => return Ok(None),
            None => {
                let hint = named.and_then(|thinking| thinking.budget_tokens);
                return Ok(hint.or(asked.budget).map(Some));
            }
            Some(-1) => None,
            Some(budget) => match usize::try_from(budget) {
                Ok(budget) => Some(budget),
                Err(_) => {
                    let what = format!("must be 0 or more, or -1 for no limit, not {budget}");
                    return wrong(BUDGET, what);
                }
            },
        };
        if budget.is_some() && self.thoughts.is_none() {
            let what = "is not supported by this model: leave it out, or start the server with --reasoning-parser";
            return wrong(BUDGET, what);
        }
        Ok(Some(budget))
    }

    /// The limit on the thoughts of answers with these rules, if the model marks its thoughts.
    ///
    /// # Errors
    /// `Invalid`, if the request names a limit that cannot be kept: in Harmony, what closes a thought is the header of the
    /// answer, after which there are no calls.
    pub(super) fn thought_limit(
        &self,
        plan: &ThinkingPlan,
        rules: &MessageRules,
    ) -> Result<Option<ThoughtLimit>> {
        let is_open = match (&rules.harmony, rules.reasoning) {
            (Some(_), _) if rules.tools.is_some() => {
                if plan.is_named {
                    let what = "is not possible together with tools in this model's format: use reasoning_effort";
                    return wrong(BUDGET, what);
                }
                None
            }
            (Some(beginning), _) => {
                Some(HarmonyParser::new(beginning, Arc::new([]), 0).is_reasoning())
            }
            (None, reasoning) => reasoning.map(|(_, is_open)| is_open),
        };
        let (Some(is_open), Some(marks)) = (is_open, self.thoughts) else {
            return Ok(None);
        };
        let max_tokens = plan.max_tokens.filter(|_| is_open || !plan.only_open);
        Ok(max_tokens.map(|max_tokens| ThoughtLimit {
            marks: marks.clone(),
            max_tokens,
            is_open,
        }))
    }
}

/// Sets a variable of the template, unless it is set.
fn set(variables: &mut Option<Map<String, Value>>, name: &str, value: impl Into<Value>) {
    let variables = variables.get_or_insert_default();
    variables.entry(name).or_insert_with(|| value.into());
}
