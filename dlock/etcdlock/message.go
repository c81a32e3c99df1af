package etcdlock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock/internal/wait"
)

const (
	// quietTime is how long a waiter waits for a message before it reads.
	quietTime = time.Second
	// longQuietTime is the same for a waiter that watches the key before its own. It then reads both keys: in a store restored to
	// an earlier revision, a watch sees nothing until its first revision comes again.
	longQuietTime = 10 * time.Second
	// messageTime is the same once the key before its own was deleted.
	messageTime = 20 * time.Millisecond
	// most is how many waiters a message names: every 32nd hand-over takes two commits.
	most = 32
)

type position struct {
	name string // {LEASE}-{N}
	rev  int64
}

func (p position) in(queue string) clientv3.Cmp { return owns(queue+p.name, uint64(p.rev)) }

type notice struct {
	rev     int64      // the key's create revision; 0: it isn't first
	at      time.Time  // when it became first, at the latest
	waiters []position // behind it, in order, as far as known; any may have left
}

func (b *Backend) messages(id clientv3.LeaseID) string { return fmt.Sprintf("%sturn/%x", b.prefix, id) }

func (b *Backend) message(queue string, q []position) (clientv3.Op, error) {
	lease, _, _ := strings.Cut(q[0].name, "-")
	id, err := strconv.ParseInt(lease, 16, 64)
	return clientv3.OpPut(b.messages(clientv3.LeaseID(id)), format(queue, q), clientv3.WithLease(clientv3.LeaseID(id))), err
}

func format(queue string, q []position) string {
	var m strings.Builder
	for _, p := range q {
		fmt.Fprintf(&m, "%s %d ", p.name, p.rev)
	}
	return m.String() + "\n" + queue
}

func parse(m string) (queue string, q []position) {
	positions, queue, _ := strings.Cut(m, "\n")
	f := strings.Fields(positions)
	for i := 0; i+1 < len(f); i += 2 {
		rev, err := strconv.ParseInt(f[i+1], 10, 64)
		if err != nil {
			return "", nil
		}
		q = append(q, position{f[i], rev})
	}
	return queue, q
}

func (b *Backend) claimOf(queue string, p position) *claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.names[queue+p.name]
}

// handOver returns an operation for the transaction that deletes the holder's key. It notifies the first waiter or, if that has
// left, reads the queue. A claim of this Backend needs no message.
func (b *Backend) handOver(queue string, waiters []position) (op clientv3.Op, notifies bool) {
	read := clientv3.OpGet(queue, clientv3.WithPrefix(), clientv3.WithKeysOnly(),
		clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend), clientv3.WithLimit(1+most))
	if len(waiters) == 0 {
		return read, false
	}
	op, err := b.message(queue, waiters)
	if err != nil {
		return read, false
	}
	var message []clientv3.Op
	if b.claimOf(queue, waiters[0]) == nil {
		message = []clientv3.Op{op}
	}
	return clientv3.OpTxn([]clientv3.Cmp{waiters[0].in(queue)}, message, []clientv3.Op{read}), true
}

func (b *Backend) handedOver(
	ctx context.Context, queue, name string, waiters []position, answer *pb.ResponseOp, notifies bool, sent time.Time,
) {
	if notifies {
		txn := answer.GetResponseTxn()
		if txn.Succeeded {
			b.claimOf(queue, waiters[0]).notify(waiters, sent)
			return
		}
		answer = txn.Responses[0]
	}
	q := positions(queue, answer.GetResponseRange().GetKvs())
	if len(q) < 2 || queue+q[0].name != name {
		return // nobody waits, or the key wasn't first
	}
	q = q[1:]
	if c := b.claimOf(queue, q[0]); c != nil {
		c.notify(q, sent)
		return
	}
	op, err := b.message(queue, q)
	if err != nil || !b.begin() {
		return
	}
	go func() { // if this fails, the waiter reads
		defer b.busy.Done()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
		defer cancel()
		_, _ = b.c.Txn(ctx).If(q[0].in(queue)).Then(op).Commit()
	}()
}

func positions(queue string, kvs []*mvccpb.KeyValue) (q []position) {
	for _, kv := range kvs {
		q = append(q, position{strings.TrimPrefix(string(kv.Key), queue), kv.CreateRevision})
	}
	return q
}

// notify tells c, which may be nil, that its key is first in q, as of a request that left at that time.
func (c *claim) notify(q []position, at time.Time) {
	if c == nil {
		return
	}
	c.mu.Lock()
	c.notice = notice{q[0].rev, at, q[1:]}
	c.mu.Unlock()
	select {
	case c.notified <- struct{}{}:
	default:
	}
}

func (c *claim) noticeOf(rev int64) notice {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.notice.rev != rev {
		return notice{}
	}
	return c.notice
}

// listen watches the session's messages from the first call's revision on, and reports whether it misses none since rev.
func (s *session) listen(b *Backend, rev int64) (all bool) {
	s.listens.Do(func() {
		s.from = rev
		if !b.begin() {
			return
		}
		go func() {
			defer b.busy.Done()
			s.receive(b, rev)
		}()
	})
	return s.from <= rev
}

// Waiters tolerate the loss of messages by compaction or a restore.
func (s *session) receive(b *Backend, rev int64) {
	ctx, end := wait.Both(b.open, s.over)
	defer end()
	for rest := minPause; ctx.Err() == nil; rest = min(2*rest, maxPause) {
		var err error
		watched, refused := b.watching(ctx)
		// One watch for the session's lifetime: opening one takes longer than a hand-over.
		for resp := range b.c.Watch(watched, b.messages(s.id), clientv3.WithRev(rev), clientv3.WithFilterDelete()) {
			now := time.Now()
			for _, e := range resp.Events {
				if queue, q := parse(string(e.Kv.Value)); len(q) > 0 {
					b.claimOf(queue, q[0]).notify(q, now)
				}
				rev, rest = e.Kv.ModRevision+1, minPause
			}
			rev, err = max(rev, resp.CompactRevision), resp.Err()
		}
		refused(err)
		wait.For(ctx, rest)
	}
}
