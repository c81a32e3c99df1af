package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

var consul = serverType{
	name: "consul", title: "Consul", image: "hashicorp/consul:1.14.4", ports: []int{8500, 8300, 8301}, data: "/consul/data",
	program: "consul", module: "consul",
	url:     "http://%s",
	command: consulCommand,
	ready:   consulReady,
}

// ConsulMinSession is these servers' shortest session TTL; Consul's default is 10 s.
const ConsulMinSession = 10 * time.Millisecond

// StartConsul starts a single Consul server. Sessions end after twice their TTL.
func StartConsul(ctx context.Context, o *Options) (*Server, error) {
	return startSingle(ctx, &consul, o)
}

func consulCommand(_ context.Context, at placement) (command, error) {
	ports := at.me().Ports
	args := []string{
		"consul", "agent", "-server", "-bootstrap", "-node=consul",
		"-data-dir=" + at.Dir, "-disable-host-node-id",
		"-bind=127.0.0.1", // its own cluster traffic
		"-client=" + at.Listen, "-http-port=" + strconv.Itoa(ports[0]),
		"-server-port=" + strconv.Itoa(ports[1]), "-serf-lan-port=" + strconv.Itoa(ports[2]),
		"-serf-wan-port=-1", "-dns-port=-1", "-grpc-port=-1", "-grpc-tls-port=-1",
		"-hcl=disable_update_check=true",
		"-hcl=performance{raft_multiplier=1}", // the shortest timeouts; 5 by default
		fmt.Sprintf("-hcl=session_ttl_min=%q", ConsulMinSession),
		"-hcl=limits{http_max_conns_per_client=0}", // unlimited: all clients come from one address; 200 by default
	}
	return command{Args: append(args, at.More...)}, nil
}

func consulReady(ctx context.Context, addr, _ string, _ bool) (version string, err error) {
	var session struct{ ID string }
	if err := requestJSON(ctx, http.MethodPut, addr, "/v1/session/create", &session); err != nil {
		return "", err
	}
	var removed bool
	if err := requestJSON(ctx, http.MethodPut, addr, "/v1/session/destroy/"+session.ID, &removed); err != nil {
		return "", err
	}
	var self struct{ Config struct{ Version string } }
	if err := requestJSON(ctx, http.MethodGet, addr, "/v1/agent/self", &self); err != nil {
		return "", err
	}
	if self.Config.Version == "" {
		return "", errors.New("/v1/agent/self names no version")
	}
	return self.Config.Version, nil
}
