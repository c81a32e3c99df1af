package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Names of the environment variables that choose a Consul.
const (
	EnvConsulImage  = "FENCELAB_CONSUL_IMAGE"
	EnvConsulServer = "FENCELAB_CONSUL_SERVER" // the path of consul
	EnvConsulAddr   = "FENCELAB_CONSUL_ADDR"   // host:port
)

// ConsulImage is the image that containers run unless FENCELAB_CONSUL_IMAGE names another.
const ConsulImage = "hashicorp/consul:1.14.4"

var consulKind = kind{
	name: "consul", title: "Consul", env: "CONSUL",
	image: ConsulImage, ports: []int{8500, 8300, 8301}, data: "/consul/data",
	timeout:  time.Minute, // 1 to 2 s are usual: a server waits that long for a leader's heartbeat before it votes
	want:     "host:port",
	url:      func(addr string) string { return "http://" + addr },
	programs: []string{"consul"}, module: "consul",
	ready: consulReady,
}

// ConsulMinSession is the shortest TTL of a session here; 10 s is usual.
const ConsulMinSession = 10 * time.Millisecond

// StartConsul starts a single Consul server, or finds the external one, and returns once sessions can be made. Killed
// and restarted, it keeps its data. Sessions may have a TTL from 10 ms, and Consul ends them after twice that time. It
// serves HTTP alone and calls nobody. The rest is as [StartRedis] says.
func StartConsul(ctx context.Context, o *Options) (*Server, error) {
	c, err := start(ctx, &group{kind: &consulKind, names: []string{"consul"}, command: consulCommand}, o)
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

func consulCommand(_ context.Context, at place) (command, error) {
	ports := at.me().Ports
	args := []string{
		"consul", "agent", "-server", "-bootstrap", "-node=consul",
		"-data-dir=" + at.Dir, "-disable-host-node-id",
		"-bind=127.0.0.1", // what one server tells itself doesn't leave the machine, or the container
		"-client=" + at.Listen, "-http-port=" + strconv.Itoa(ports[0]),
		"-server-port=" + strconv.Itoa(ports[1]), "-serf-lan-port=" + strconv.Itoa(ports[2]),
		"-serf-wan-port=-1", "-dns-port=-1", "-grpc-port=-1", "-grpc-tls-port=-1",
		"-hcl=disable_update_check=true",
		"-hcl=performance{raft_multiplier=1}", // the shortest timeouts, instead of 5 times those
		fmt.Sprintf("-hcl=session_ttl_min=%q", ConsulMinSession),
		"-hcl=limits{http_max_conns_per_client=0}", // unlimited: all clients come from one address; 200 by default
	}
	return command{Args: append(args, at.More...)}, nil
}

// consulReady makes a session and removes it: that takes a leader which knows the node.
func consulReady(ctx context.Context, addr string, _ int) (version string, err error) {
	var session struct{ ID string }
	if err := httpJSON(ctx, http.MethodPut, addr, "/v1/session/create", &session); err != nil {
		return "", err
	}
	var removed bool
	if err := httpJSON(ctx, http.MethodPut, addr, "/v1/session/destroy/"+session.ID, &removed); err != nil {
		return "", err
	}
	var self struct{ Config struct{ Version string } }
	if err := httpJSON(ctx, http.MethodGet, addr, "/v1/agent/self", &self); err != nil {
		return "", err
	}
	if self.Config.Version == "" {
		return "", errors.New("/v1/agent/self names no version")
	}
	return self.Config.Version, nil
}
