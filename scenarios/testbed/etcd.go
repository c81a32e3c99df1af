package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"
)

var etcd = serverType{
	name: "etcd", title: "etcd", image: "quay.io/coreos/etcd:v3.6.16", ports: []int{2379, 2380}, data: "/var/lib/etcd",
	program: "etcd", module: "etcd", tool: "etcdutl", // which Debian 12's package, of another version, lacks
	url:     "http://%s",
	linked:  true,
	command: etcdCommand,
	ready: func(ctx context.Context, addr, _ string, _ bool) (string, error) {
		var health struct{ Health, Reason string }
		if err := requestJSON(ctx, http.MethodGet, addr, "/health", &health); err != nil {
			return "", err
		}
		if health.Health != "true" { // a linearizable read, so it has a leader
			return "", fmt.Errorf("not healthy: %s", health.Reason)
		}
		var version struct{ EtcdServer string }
		err := requestJSON(ctx, http.MethodGet, addr, "/version", &version)
		return version.EtcdServer, err
	},
	leads: func(ctx context.Context, addr string) (bool, error) {
		var status struct {
			Header struct {
				Member string `json:"member_id"`
			}
			Leader string
		}
		err := requestJSON(ctx, http.MethodPost, addr, "/v3/maintenance/status", &status)
		return err == nil && status.Leader != "" && status.Leader == status.Header.Member, err
	},
}

// StartEtcd starts an etcd of n members, 1 or 3, and returns once each answers linearizable reads. To Raft, a wiped member has a
// corrupted log. Leases are whole seconds, at least 1.
func StartEtcd(ctx context.Context, n int, o *Options) (*Cluster, error) {
	if n != 1 && n != 3 {
		return nil, fmt.Errorf("testbed: an etcd cluster of %d members; want 1 or 3", n)
	}
	return start(ctx, &group{serverType: &etcd, names: numbered("etcd", n)}, o)
}

const (
	etcdHeartbeat = 60 * time.Millisecond
	// etcdElection is the longest that permits leases of 1 s: etcd counts floor(1.5 × 11) heartbeats.
	etcdElection = 11 * etcdHeartbeat
	etcdQuota    = 64 << 20
)

func etcdCommand(_ context.Context, at placement) (command, error) {
	me := at.me()
	args := []string{
		"/usr/local/bin/etcd",
		"--name", me.Name,
		"--data-dir", etcdData(at),
		"--listen-client-urls", etcdURL(at.Listen, me.Ports[0]),
		"--advertise-client-urls", etcdURL(me.Host, me.Ports[0]),
		"--listen-peer-urls", etcdURL(at.Listen, me.Ports[1]),
		"--heartbeat-interval", strconv.FormatInt(etcdHeartbeat.Milliseconds(), 10),
		"--election-timeout", strconv.FormatInt(etcdElection.Milliseconds(), 10),
		"--quota-backend-bytes", strconv.Itoa(etcdQuota),
		"--unsafe-no-fsync",
		"--log-level", "warn",
	}
	args = append(args, etcdMembers(at)...)
	return command{Args: append(args, at.More...)}, nil
}

func etcdMembers(at placement) []string {
	urls := make([]string, len(at.Peers))
	members := make([]string, len(at.Peers))
	for i, p := range at.Peers {
		urls[i] = etcdURL(p.Host, p.Ports[1])
		members[i] = p.Name + "=" + urls[i]
	}
	return []string{"--initial-cluster", strings.Join(members, ","), "--initial-advertise-peer-urls", urls[at.Self]}
}

func etcdURL(host string, port int) string { return fmt.Sprintf("http://%s:%d", host, port) }

// etcdData is created by etcd, with its own permissions.
func etcdData(at placement) string { return path.Join(at.Dir, "etcd") }

// RestoreSnapshot replaces the data of a single etcd member: it kills the member, restores the snapshot with etcdutl and restarts
// the member. Later writes are lost. Revisions go back or, if bumpRevision is above 0, continue from the snapshot's plus
// bumpRevision (--bump-revision --mark-compacted).
func (c *Cluster) RestoreSnapshot(ctx context.Context, snapshot []byte, bumpRevision uint64) error {
	s := c.Servers[0]
	if s.serverType != &etcd || len(c.Servers) != 1 {
		return fmt.Errorf("testbed: restore a snapshot: only of a single etcd member: %w", errors.ErrUnsupported)
	}
	return s.change(ctx, "restore a snapshot of", func(ctx context.Context) error {
		s.running = false
		if err := s.host.kill(ctx); err != nil {
			return err
		}
		if err := s.host.wipe(ctx); err != nil {
			return err
		}
		at := s.placement()
		file := path.Join(at.Dir, "snapshot.db")
		util := command{
			Args: append([]string{
				"/usr/local/bin/etcdutl", "snapshot", "restore", file, "--name", at.me().Name, "--data-dir", etcdData(at),
			}, etcdMembers(at)...),
			Files: map[string][]byte{file: snapshot},
		}
		if bumpRevision > 0 {
			util.Args = append(util.Args, "--bump-revision", strconv.FormatUint(bumpRevision, 10), "--mark-compacted")
		}
		if at.Provider == Local {
			var err error
			if util.Path, err = etcd.find("etcdutl"); err != nil {
				return err
			}
		}
		if err := s.host.runOnce(ctx, util); err != nil {
			return fmt.Errorf("etcdutl: %w", err)
		}
		return s.begin(ctx)
	})
}
