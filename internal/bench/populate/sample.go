package populate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Pings are latencies of the server's cheapest request since the sample before, on a connection of their own.
type Pings struct {
	Count   int           `json:"pings"`       // about 100 a second, fewer if they took longer
	PingP50 time.Duration `json:"ping_p50_ns"` // the median
	PingMax time.Duration `json:"ping_max_ns"` // the longest
}

// RedisSample is from a Redis's INFO.
type RedisSample struct {
	UsedMemory       uint64  `json:"used_memory"`             // bytes allocated
	UsedMemoryRSS    uint64  `json:"used_memory_rss"`         // bytes in RAM
	Fragmentation    float64 `json:"mem_fragmentation_ratio"` // UsedMemoryRSS / UsedMemory
	Keys             uint64  `json:"keys"`                    // with expired ones that are not yet deleted
	Expires          uint64  `json:"expires"`                 // those of them with a TTL
	ExpiredKeys      uint64  `json:"expired_keys"`            // deleted by expiry since the start
	ExpiredStalePerc float64 `json:"expired_stale_perc"`      // Redis's estimate of how much of Expires has expired, in %
	Pings
}

// String is for a line of progress.
func (s RedisSample) String() string {
	return fmt.Sprintf("used %sB, RSS %sB (%.2f)  %s keys, %s with a TTL  expired %s (stale %.0f %%)  ping %v, max %v",
		Short(float64(s.UsedMemory)), Short(float64(s.UsedMemoryRSS)), s.Fragmentation,
		Short(float64(s.Keys)), Short(float64(s.Expires)), Short(float64(s.ExpiredKeys)), s.ExpiredStalePerc,
		s.PingP50.Round(time.Microsecond), s.PingMax.Round(time.Microsecond))
}

// EtcdSample is from an etcd member's /metrics. A ping is a linearizable read.
type EtcdSample struct {
	Revision      uint64 `json:"revision"`       // grows by one with each write
	Keys          uint64 `json:"keys"`           // that exist
	DBSize        uint64 `json:"db_size"`        // bytes of the database's file
	DBSizeInUse   uint64 `json:"db_size_in_use"` // bytes of it in use, with history
	RSS           uint64 `json:"rss"`            // bytes in RAM
	LeasesGranted uint64 `json:"leases_granted"` // since it started
	LeasesRevoked uint64 `json:"leases_revoked"` // since it started, with expired ones
	Proposals     uint64 `json:"proposals"`      // committed entries of the Raft log
	Syncs         uint64 `json:"wal_fsyncs"`     // since it started
	Pings
}

// String is for a line of progress.
func (s EtcdSample) String() string {
	return fmt.Sprintf("revision %s  %s keys, %s leases  db %sB, %sB in use, RSS %sB  read %v, max %v",
		Short(float64(s.Revision)), Short(float64(s.Keys)), Short(float64(s.LeasesGranted-s.LeasesRevoked)),
		Short(float64(s.DBSize)), Short(float64(s.DBSizeInUse)), Short(float64(s.RSS)),
		s.PingP50.Round(time.Microsecond), s.PingMax.Round(time.Microsecond))
}

// Sample is a server's state at one moment.
type Sample struct {
	Redis *RedisSample `json:"redis,omitempty"`
	Etcd  *EtcdSample  `json:"etcd,omitempty"`
}

func (s Sample) String() string {
	if s.Redis != nil {
		return s.Redis.String()
	}
	return s.Etcd.String()
}

// Pings returns those of the sample.
func (s Sample) Pings() *Pings {
	if s.Redis != nil {
		return &s.Redis.Pings
	}
	return &s.Etcd.Pings
}

// Server is pinged about 100 times a second, and sampled on request. It doesn't close the client.
type Server struct {
	ask  func(ctx context.Context) (Sample, error)
	stop func()

	mu   sync.Mutex
	took []time.Duration
	err  error
}

func watch(ctx context.Context, ask func(ctx context.Context) (Sample, error), ping func(context.Context) error) *Server {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	s := &Server{ask: ask, stop: func() { cancel(); <-done }}
	go func() {
		defer close(done)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			began := time.Now()
			err := ping(ctx)
			took := time.Since(began)
			if ctx.Err() != nil {
				return
			}
			s.mu.Lock()
			s.took = append(s.took, took)
			if err != nil {
				s.err = fmt.Errorf("populate: ping: %w", err)
			}
			s.mu.Unlock()
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	}()
	return s
}

// Close ends the pings.
func (s *Server) Close() { s.stop() }

// Ask returns a sample without pings.
func (s *Server) Ask(ctx context.Context) (Sample, error) {
	out, err := s.ask(ctx)
	if err != nil {
		return out, fmt.Errorf("populate: %w", err)
	}
	return out, nil
}

// Sample returns a sample with the pings since the last one, and the error of a failed ping.
func (s *Server) Sample(ctx context.Context) (Sample, error) {
	out, err := s.Ask(ctx)
	if err != nil {
		return out, err
	}
	s.mu.Lock()
	took, err := s.took, s.err
	s.took = nil
	s.mu.Unlock()
	if n := len(took); n > 0 {
		slices.Sort(took)
		*out.Pings() = Pings{n, took[n/2], took[n-1]}
	}
	return out, err
}

// WatchRedis watches the client's server.
func WatchRedis(ctx context.Context, client *redis.Client) *Server {
	return watch(ctx, func(ctx context.Context) (Sample, error) {
		info, err := client.InfoMap(ctx).Result()
		if err != nil {
			return Sample{}, err
		}
		s, err := parseInfo(info)
		return Sample{Redis: &s}, err
	}, func(ctx context.Context) error { return client.Ping(ctx).Err() })
}

// A missing field is an error, since 0 would be an answer.
func parseInfo(info map[string]map[string]string) (s RedisSample, err error) {
	number := func(section, name string) float64 {
		v, perr := strconv.ParseFloat(info[section][name], 64)
		if perr != nil {
			err = errors.Join(err, fmt.Errorf("INFO says %s:%s, which is no number", name, info[section][name]))
		}
		return v
	}
	s.UsedMemory, s.UsedMemoryRSS = uint64(number("Memory", "used_memory")), uint64(number("Memory", "used_memory_rss"))
	s.Fragmentation = number("Memory", "mem_fragmentation_ratio")
	s.ExpiredKeys, s.ExpiredStalePerc = uint64(number("Stats", "expired_keys")), number("Stats", "expired_stale_perc")
	for name, db := range info["Keyspace"] {
		var keys, expires uint64
		if _, serr := fmt.Sscanf(db, "keys=%d,expires=%d", &keys, &expires); serr != nil {
			err = errors.Join(err, fmt.Errorf("INFO says %s:%s: %w", name, db, serr))
		}
		s.Keys, s.Expires = s.Keys+keys, s.Expires+expires
	}
	return s, err
}

// WatchEtcd watches the first of a client's members.
func WatchEtcd(ctx context.Context, client *clientv3.Client) *Server {
	url := client.Endpoints()[0]
	if !strings.Contains(url, "://") {
		url = "http://" + url
	}
	url = strings.TrimSuffix(url, "/") + "/metrics"
	transport := &http.Transport{}
	s := watch(ctx, func(ctx context.Context) (Sample, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return Sample{}, err
		}
		resp, err := (&http.Client{Transport: transport}).Do(req)
		if err != nil {
			return Sample{}, err
		}
		defer func() { _ = resp.Body.Close() }()
		s, err := parseMetrics(resp.Body)
		return Sample{Etcd: &s}, err
	}, func(ctx context.Context) error {
		_, err := client.Get(ctx, "ping", clientv3.WithCountOnly())
		return err
	})
	stop := s.stop
	s.stop = func() { stop(); transport.CloseIdleConnections() }
	return s
}

// A missing metric is an error, since 0 would be an answer.
func parseMetrics(r io.Reader) (s EtcdSample, err error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(r)
	if err != nil {
		return s, fmt.Errorf("/metrics of etcd: %w", err)
	}
	for name, to := range map[string]*uint64{
		"etcd_debugging_mvcc_current_revision": &s.Revision, "etcd_debugging_mvcc_keys_total": &s.Keys,
		"etcd_mvcc_db_total_size_in_bytes": &s.DBSize, "etcd_mvcc_db_total_size_in_use_in_bytes": &s.DBSizeInUse,
		"process_resident_memory_bytes":      &s.RSS,
		"etcd_debugging_lease_granted_total": &s.LeasesGranted, "etcd_debugging_lease_revoked_total": &s.LeasesRevoked,
		"etcd_server_proposals_committed_total": &s.Proposals, "etcd_disk_wal_fsync_duration_seconds": &s.Syncs,
	} {
		metrics := all[name].GetMetric()
		if len(metrics) == 0 {
			err = errors.Join(err, fmt.Errorf("/metrics of etcd has no %s", name))
			continue
		}
		m := metrics[0]
		*to = uint64(m.GetGauge().GetValue()+m.GetCounter().GetValue()) + m.GetHistogram().GetSampleCount()
	}
	return s, err
}
