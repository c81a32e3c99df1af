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

	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// txn returns the index of the last entry in the reply; a deletion has none.
func (b *Backend) txn(ctx context.Context, ops ...*api.KVTxnOp) (index uint64, no refusal, err error) {
	all := make(api.TxnOps, len(ops))
	for i, op := range ops {
		all[i] = &api.TxnOp{KV: op}
	}
	// For read-only transactions: the leader checks that it still leads.
	ok, answer, _, err := b.c.Txn().Txn(all, (&api.QueryOptions{RequireConsistent: true}).WithContext(ctx))
	switch {
	case err != nil:
		return 0, nil, failed(ctx, err)
	case !ok && len(answer.Errors) == 0:
		return 0, nil, errors.New("consullock: a transaction was refused without a reason")
	case !ok:
		return 0, refusal(answer.Errors), nil
	}
	for _, r := range answer.Results {
		if r != nil && r.KV != nil {
			index = r.KV.ModifyIndex
		}
	}
	if index == 0 {
		return 0, nil, errors.New("consullock: a transaction has no results")
	}
	return index, nil, nil
}

type refusal api.TxnErrors

func (r refusal) Error() string {
	s := make([]string, len(r))
	for i, e := range r {
		s[i] = e.What
	}
	return "consullock: refused: " + strings.Join(s, "; ")
}

// is matches an operation's error by its text: Consul has no codes.
func (r refusal) is(prefix, suffix string) bool {
	return slices.ContainsFunc(r, func(e *api.TxnError) bool {
		return strings.HasPrefix(e.What, prefix) && strings.HasSuffix(e.What, suffix)
	})
}

func (r refusal) exists(name string) bool { return r.is(fmt.Sprintf("key %q exists", name), "") }
func (r refusal) noSession() bool         { return r.is("invalid session ", "") }
func (r refusal) lockDelay() bool         { return r.is("failed to lock key ", " due to lock delay") }
func (r refusal) changed() bool {
	return r.is("failed index check for key ", "") || r.is("failed to check index, key ", "")
}

func (r refusal) heldElsewhere(name string) bool {
	return r.is(fmt.Sprintf("failed to lock key %q, lock is already held", name), "")
}

func retryable(err error) bool {
	if _, refused := errors.AsType[refusal](err); refused {
		return false
	}
	status, ok := errors.AsType[api.StatusError](err)
	return !ok || status.Code >= http.StatusInternalServerError || status.Code == http.StatusTooManyRequests
}

// read returns key's entry, nil if there is none, and its index. It waits up to poll for an index greater than after.
func (b *Backend) read(ctx context.Context, key string, after uint64, poll time.Duration) (*api.KVPair, uint64, error) {
	q, cancel := query(ctx, after, poll)
	defer cancel()
	e, meta, err := b.c.KV().Get(b.name(key), q)
	if err != nil {
		return nil, 0, failed(q.Context(), err) //nolint:contextcheck // it descends from ctx
	}
	return e, meta.LastIndex, nil
}

// query returns the options of a blocking query, or of a plain read if after is 0. If poll is 0, only ctx bounds it.
func query(ctx context.Context, after uint64, poll time.Duration) (*api.QueryOptions, context.CancelFunc) {
	cancel := context.CancelFunc(func() {})
	if poll != 0 {
		limit := grace
		if after != 0 {
			limit += poll + poll/16
		}
		ctx, cancel = context.WithTimeoutCause(ctx, limit, wait.ErrNoAnswer)
	}
	q := &api.QueryOptions{WaitIndex: after, WaitTime: poll, RequireConsistent: true}
	return q.WithContext(ctx), cancel
}

// since returns the next blocking query's index: 0, answered at once, if indexes went backwards, as after a restore
// (https://developer.hashicorp.com/consul/api-docs/features/blocking).
func since(last, now uint64) uint64 {
	if now < last {
		return 0
	}
	return now
}

func failed(ctx context.Context, err error) error { return wait.Failed(ctx, "consullock", err) }
