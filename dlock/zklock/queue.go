package zklock

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"
)

// place is where an owner's nodes for a key are: children of parent named owner + ":" + sequence number.
type place struct{ parent, owner string }

func (b *Backend) place(key, owner string) place {
	return place{b.root + "/" + escape(key), escape(owner)}
}

// escape leaves only letters, digits and -_~%+: ZooKeeper refuses some characters, and "." and "..".
func escape(s string) string { return strings.ReplaceAll(url.QueryEscape(s), ".", "%2E") }

type node struct {
	parent, name string
	owner        string
	seq          int32
	czxid        int64 // 0 if unknown
}

func (n node) path() string { return n.parent + "/" + n.name }

// queue returns a key's queue, in order, and the zxid of the last creation or deletion in it, 0 if unknown.
func (b *Backend) queue(ctx context.Context, parent string) (q []node, changed int64, err error) {
	r, err := b.children(ctx, parent)
	if errors.Is(err, zk.ErrNoNode) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	overflow := false
	for _, name := range r.names {
		i := strings.LastIndexByte(name, ':')
		seq, err := strconv.ParseInt(name[i+1:], 10, 32)
		if i < 0 || err != nil {
			continue
		}
		q = append(q, node{parent: parent, name: name, owner: name[:i], seq: int32(seq)})
		overflow = overflow || seq < 0 || seq == math.MaxInt32
	}
	if !overflow {
		slices.SortFunc(q, func(m, n node) int { return cmp.Compare(m.seq, n.seq) })
		return q, r.stat.Pzxid, nil
	}
	// The parent's 32-bit counter wraps around, and the server may then issue a number several times. The zxids give the order,
	// at a request per node.
	live := q[:0]
	for _, n := range q {
		r, err := b.exists(ctx, n.path())
		if err != nil {
			return nil, 0, err
		}
		if r.ok {
			n.czxid = r.stat.Czxid
			live = append(live, n)
		}
	}
	slices.SortFunc(live, func(m, n node) int { return cmp.Compare(m.czxid, n.czxid) })
	return live, 0, nil
}

func (b *Backend) held(ctx context.Context, parent string) (bool, error) {
	q, _, err := b.queue(ctx, parent)
	if err == nil && len(q) > 0 { // it is, or was a moment ago
		q, err = b.look(ctx, parent)
	}
	return len(q) > 0, err
}

// look returns the queue as of its call, or later. The client's server may lag, and the leader ignores a sync. But writes are
// ordered, so look sends one whose version must fail.
func (b *Backend) look(ctx context.Context, parent string) ([]node, error) {
	switch err := b.setData(ctx, parent, nil, math.MaxInt32); {
	case errors.Is(err, zk.ErrNoNode):
		return nil, nil
	case !errors.Is(err, zk.ErrBadVersion):
		return nil, err
	}
	q, _, err := b.queue(ctx, parent)
	return q, err
}

func (b *Backend) sweep(ctx context.Context, q []node, owner, except string) (n int, err error) {
	for _, m := range q {
		if m.owner != owner || m.name == except {
			continue
		}
		switch err := b.deleteAt(ctx, m.path(), -1); {
		case err == nil:
			n++
		case !errors.Is(err, zk.ErrNoNode):
			return n, err
		}
	}
	return n, nil
}

func (b *Backend) sweepAll(ctx context.Context, p place) (n int, err error) {
	q, err := b.look(ctx, p.parent)
	if err != nil {
		return 0, err
	}
	return b.sweep(ctx, q, p.owner, "")
}

// join creates a node at p. If it fails, it leaves nothing behind.
func (b *Backend) join(ctx context.Context, p place, ttl time.Duration) (l *lease, q []node, err error) {
	path, sent, err := b.create(ctx, p, ttl)
	if err != nil {
		if sent {
			b.clean(p, err)
		}
		return nil, nil, err
	}
	l = b.own(node{parent: p.parent, name: path[len(p.parent)+1:]})
	// This client now sees every earlier node. The owner's other nodes come from creates without a reply.
	var changed int64
	if err = thrice(func() (err error) { q, changed, err = b.queue(ctx, p.parent); return err }); err == nil {
		_, err = b.sweep(ctx, q, p.owner, l.node.name)
		q = slices.DeleteFunc(q, func(n node) bool { return n.owner == p.owner && n.name != l.node.name })
	}
	if err == nil {
		err = b.number(ctx, l, q, changed)
	}
	if err != nil {
		if sent {
			b.clean(p, err)
		}
		b.remove(l)
		return nil, nil, err
	}
	return l, q, nil
}

// number sets l's token: the zxid of its node's creation, or a later one before the next node's. If the node is the last in q,
// the queue's last change qualifies.
func (b *Backend) number(ctx context.Context, l *lease, q []node, changed int64) error {
	if len(q) > 0 && changed != 0 && q[len(q)-1].name == l.node.name {
		l.token = changed
		return nil
	}
	var r reply
	err := thrice(func() (err error) { r, err = b.exists(ctx, l.node.path()); return err })
	switch {
	case err != nil:
		return err
	case !r.ok:
		return errGone
	}
	l.token = r.stat.Czxid
	return nil
}

// create appends a node to p's queue, and creates its parent if need be. It repeats a create without a reply, after which sent
// says that there may be another node.
func (b *Backend) create(ctx context.Context, p place, ttl time.Duration) (path string, sent bool, err error) {
	for range 3 {
		var r reply
		err = thrice(func() (err error) {
			r, err = b.createAt(ctx, p.parent+"/"+p.owner+":", []byte(ttl.String()), zk.FlagEphemeral|zk.FlagSequence)
			cut, isCut := errors.AsType[*cutShortError](err)
			sent = sent || isCut && cut.answered != nil || broken(err) && !errors.Is(err, zk.ErrNoServer)
			return err
		})
		if !errors.Is(err, zk.ErrNoNode) {
			return r.path, sent, err
		}
		// The server deletes a container some time after its last child.
		if err := b.createNode(ctx, p.parent, zk.FlagContainer); err != nil {
			return "", sent, err
		}
	}
	return "", sent, err
}

func (b *Backend) createNode(ctx context.Context, path string, flags int32) error {
	create := func() error { _, err := b.createAt(ctx, path, nil, flags); return err }
	err := thrice(create)
	if errors.Is(err, zk.ErrNoNode) {
		if err := b.createNode(ctx, path[:strings.LastIndexByte(path, '/')], zk.FlagPersistent); err != nil {
			return err
		}
		err = thrice(create)
	}
	if errors.Is(err, zk.ErrNodeExists) {
		return nil
	}
	return err
}

func thrice(f func() error) (err error) {
	for range 3 {
		if err = f(); !broken(err) || errors.Is(err, zk.ErrNoServer) { // there is none to send to
			return err
		}
	}
	return err
}

func broken(err error) bool {
	if _, ok := errors.AsType[*cutShortError](err); ok {
		return false
	}
	for _, e := range []error{zk.ErrConnectionClosed, zk.ErrNoServer, zk.ErrClosing, zk.ErrSessionExpired, zk.ErrSessionMoved} {
		if errors.Is(err, e) {
			return true
		}
	}
	_, ok := errors.AsType[net.Error](err) // a write failed
	return ok
}
