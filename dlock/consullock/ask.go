package consullock

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
)

// txn runs operations in one transaction, or none of them: then no says why.
func (b *Backend) txn(ctx context.Context, ops ...*api.KVTxnOp) (res api.TxnResults, no refusal, err error) {
	all := make(api.TxnOps, len(ops))
	for i, op := range ops {
		all[i] = &api.TxnOp{KV: op}
	}
	// Consistent is for those that only read: the leader asks the others whether it still is.
	ok, answer, _, err := b.c.Txn().Txn(all, (&api.QueryOptions{RequireConsistent: true}).WithContext(ctx))
	switch {
	case err != nil:
		return nil, nil, failed(ctx, err)
	case !ok && len(answer.Errors) == 0:
		return nil, nil, errors.New("consullock: a transaction was refused without a reason")
	case !ok:
		return nil, refusal(answer.Errors), nil
	case len(answer.Results) == 0:
		return nil, nil, errors.New("consullock: a transaction has no results")
	}
	return answer.Results, nil, nil
}

// refusal is why a transaction was not carried out.
type refusal api.TxnErrors

func (r refusal) Error() string {
	s := make([]string, len(r))
	for i, e := range r {
		s[i] = e.What
	}
	return "consullock: refused: " + strings.Join(s, "; ")
}

// reason recognises an operation's error by its text, for Consul gives no code. One that isn't recognised is an error
// and nothing else: neither a grant nor a reason to wait.
type reason func(what string) bool

func exists(name string) reason {
	return func(what string) bool { return what == fmt.Sprintf("key %q exists", name) }
}

func noSession(what string) bool { return strings.HasPrefix(what, "invalid session ") }

func lockDelay(what string) bool {
	return strings.HasPrefix(what, "failed to lock key ") && strings.HasSuffix(what, " due to lock delay")
}

// heldElsewhere is that another session has the key. A session that has it itself may lock it again.
func heldElsewhere(name string) reason {
	return func(what string) bool {
		return what == fmt.Sprintf("failed to lock key %q, lock is already held", name)
	}
}

func changed(what string) bool {
	return strings.HasPrefix(what, "failed index check for key ") || strings.HasPrefix(what, "failed to check index, key ")
}

// is reports whether one of the reasons is why.
func (r refusal) is(why reason) bool {
	return slices.ContainsFunc(r, func(e *api.TxnError) bool { return why(e.What) })
}

// errLate is why a request was given up that Consul should have answered.
var errLate = errors.New("no answer")

// passing reports whether it may help to ask again after err, which isn't dlock.ErrHeld: unless Consul has said that it won't.
func passing(err error) bool {
	if _, refused := errors.AsType[refusal](err); refused {
		return false
	}
	status, ok := errors.AsType[api.StatusError](err)
	return !ok || status.Code >= http.StatusInternalServerError || status.Code == http.StatusTooManyRequests
}

// read returns the entry of key, nil if there is none, and its index. If the index isn't greater than after, it waits for
// that, though not longer than wait.
func (b *Backend) read(ctx context.Context, key string, after uint64, wait time.Duration) (*api.KVPair, uint64, error) {
	q, cancel := query(ctx, after, wait)
	defer cancel()
	e, meta, err := b.c.KV().Get(b.name(key), q)
	if err != nil {
		return nil, 0, failed(q.Context(), err) //nolint:contextcheck // it descends from ctx
	}
	return e, meta.LastIndex, nil
}

// query is the options of a read that waits, if after isn't 0, for an index that is greater. If wait is 0, the answer may
// take as long as ctx.
func query(ctx context.Context, after uint64, wait time.Duration) (*api.QueryOptions, context.CancelFunc) {
	cancel := context.CancelFunc(func() {})
	if wait != 0 {
		limit := grace
		if after != 0 {
			limit += wait + wait/16
		}
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errLate)
	}
	q := &api.QueryOptions{WaitIndex: after, WaitTime: wait, RequireConsistent: true}
	return q.WithContext(ctx), cancel
}

// since is the index after which to wait next. It must not go backwards, as it does after a restore, for then everything
// is new; 0 makes Consul answer at once (https://developer.hashicorp.com/consul/api-docs/features/blocking).
func since(last, now uint64) uint64 {
	if now < last {
		return 0
	}
	return now
}

// failed wraps a client's error. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("consullock: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("consullock: %w", err)
}
